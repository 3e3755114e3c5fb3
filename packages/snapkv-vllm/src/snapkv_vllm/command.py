"""The line with which vLLM's own command starts the same server."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from snapkv.errors import InvalidArgumentError
from snapkv_vllm.engine import OWN, arguments
from snapkv_vllm.settings import ServingSettings

_NAME = "--served-model-name"


def command_line(
    model: str, settings: ServingSettings, options: Sequence[str], *, name: str
) -> str:
    """``vllm serve`` with this plugin's arguments, for a shell.

    Args:
        model: what vLLM loads.
        settings: what to keep of prompts.
        options: any further ones of ``vllm serve``, passed on as they are.
        name: what the model is called in requests, unless the options say it.

    Raises:
        InvalidArgumentError: an option that the line has already, of which vLLM takes the last.
        MissingDependencyError: no vLLM, or one of another version.
    """
    _require_none_of_own(options)
    from snapkv_vllm.middleware import NAME

    named = () if _NAME in options else (_NAME, name)
    own = [*_spelt(arguments(settings, {})), "--middleware", NAME, *named]
    return shlex.join(["vllm", "serve", model, *own, *options])


def _require_none_of_own(options: Sequence[str]) -> None:
    for word in options:
        option = word.partition("=")[0].partition(".")[0].replace("_", "-")
        if option.startswith("--") and option[2:].replace("-", "_") in OWN:
            raise InvalidArgumentError(
                f"{option}: expected none with --print-command, since vLLM would take it in place "
                "of the printed one, got it; leave it out, and join the two by hand"
            )


def _spelt(options: Mapping[str, Any]) -> Iterator[str]:
    """Options of vLLM as words of its command line."""
    for name, value in options.items():
        yield "--" + name.replace("_", "-")
        if isinstance(value, Mapping):
            yield json.dumps(value)
        elif isinstance(value, list):
            yield from map(str, value)
        else:
            yield str(value)
