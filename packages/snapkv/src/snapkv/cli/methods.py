"""The methods that a command line may name, without importing torch."""

import functools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from snapkv.errors import InvalidArgumentError
from snapkv.validation import nearest

RECORD = Path(__file__).with_name("methods.json")
"""Written by `python -m tests.cli.methods` from the classes; a test compares both."""


@functools.cache
def methods() -> dict[str, dict[str, Any]]:
    """For every method by name: its `class`, `summary` and `parameters`.

    Each parameter has a `type` and a `default`, as written on a command line.
    """
    found: dict[str, dict[str, Any]] = json.loads(RECORD.read_text("utf-8"))
    return found


def known_method(name: str, argument: str = "policy") -> str:
    """The name of a method, given as its name or its class; anything else is refused."""
    if name in methods():
        return name
    of_class = {told["class"]: own for own, told in methods().items()}
    if name in of_class:
        return of_class[name]
    raise InvalidArgumentError(
        f"{argument}: expected one of {', '.join(methods())}, got {name!r}"
        f"{nearest(name, methods()) or '; see snapkv policies, and --set for parameters'}"
    )


def specs(texts: Iterable[str]) -> list[str]:
    """The policies in texts as ``snapkv:kernel_size=13,pooling=avg,h2o``; "none" names none."""
    parts = [part for text in texts for part in re.split(r",(?!\s*[\w.-]+=)", text)]
    return [part.strip() for part in parts if part.strip() not in ("", "none")]


def require_known(texts: Iterable[str]) -> None:
    """Raise if one of the policies in texts, see `specs`, is unknown."""
    for spec in specs(texts):
        known_method(spec.partition(":")[0])
