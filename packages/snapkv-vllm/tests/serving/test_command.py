"""The line with which vLLM's own command starts the same server; no vLLM is needed here."""

import pytest

from snapkv.errors import InvalidArgumentError
from snapkv_vllm.server import command_line
from snapkv_vllm.settings import ServingSettings


@pytest.mark.parametrize(
    "options",
    [
        ["--additional-config", '{"mine": 1}'],
        ['--additional_config={"mine": 1}'],
        ["--additional-config.mine", "1"],
        ["--dtype", "float32", "--logits-processors", "mine:Own"],
        ["--scheduler-cls", "mine.Own"],
        ["--worker_cls=mine.Own"],
    ],
    ids=str,
)
def test_an_option_that_would_replace_a_printed_one_is_refused(options):
    """vLLM takes the last of each: the server would compress by other settings, or not check."""
    with pytest.raises(InvalidArgumentError, match="expected none with --print-command"):
        command_line("folder", ServingSettings(budget=64), options, name="demo")
