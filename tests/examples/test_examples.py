"""The examples run as users run them and print the expected lines."""

import re
from pathlib import Path

import pytest

from tests.fresh_process import run_python

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
OF_A_SERVER = "chat_client.py"
"""Run in `tests/serving/vllm/test_example.py`."""

PRINTED = {
    "pipeline.py": [r"the filter is blocked\b", r"[\d,]+ tokens seen, 256 kept"],
    "folder.py": [
        r"garden\.txt: read, \d+ tokens",
        r"plumber\?\n.*555 0142.*\nin boiler\.txt",
        r"hang\?\n.*in the kitchen.*\nin garden\.txt",
    ],
    "batch.py": [
        r"key of the garden shed hangs in the kitchen",
        r"chimney is swept every October",
        r"Bins stand at the road before six in the morning",
    ],
    "own_policy.py": [
        r"full +depth 50 +score 1\.00",
        r"default +depth 50 +score 1\.00",
        r"mine +depth 50 +score 0\.00",
    ],
}
"""Patterns of what each prints."""


@pytest.mark.docs
@pytest.mark.parametrize("name", PRINTED)
def test_example_prints_the_expected_lines(name, tmp_path):
    printed = run_python(EXAMPLES / name, folder=tmp_path)
    for pattern in PRINTED[name]:
        assert re.search(pattern, printed), printed
    assert not list(tmp_path.iterdir())


def test_every_example_is_run_and_listed_on_both_pages():
    here = {path.name for path in EXAMPLES.glob("*.py")}
    assert here == {*PRINTED, OF_A_SERVER}
    listed = (EXAMPLES / "README.md").read_text("utf-8")
    assert {*re.findall(r"\]\(([\w/.]+\.py)\)", listed)} == here
    shown = (ROOT / "docs/examples.md").read_text("utf-8")
    assert {*re.findall(r"literalinclude\} \.\./examples/(\S+)", shown)} == here
