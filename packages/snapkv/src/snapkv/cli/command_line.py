"""The command line as it was typed, and as it would be with other options."""

import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from snapkv.cli.options import RunOptions

Change = Mapping[str, Any]
"""New values of options by their names; None takes an option away."""


def changed_options(options: RunOptions, change: Change) -> RunOptions:
    """The options with that change; what ``--set`` says of the same parameters is gone, too.

    Raises:
        InvalidArgumentError: options that do not go together.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    values: dict[str, Any] = {
        "set_": [each for each in options.set_ or [] if not _assigns(each, change)] or None
    }
    for name, value in change.items():
        values[name] = defaults[name] if value is None else value
    return dataclasses.replace(options, **values)


def changed_command(typed: Sequence[str], change: Change) -> str:
    """The command line with that change, quoted for a shell.

    Args:
        typed: all behind the program's name.
        change: options that each take a value.
    """
    end = typed.index("--") if "--" in typed else len(typed)
    kept = list(_without(typed[:end], change))
    new = [
        word
        for name, value in change.items()
        if value is not None
        for word in (_flag(name), str(value))
    ]
    return shlex.join(["snapkv", *kept, *new, *typed[end:]])


def _without(words: Sequence[str], change: Change) -> Iterator[str]:
    """The words without the options that change, and their values."""
    flags = {_flag(name) for name in change}
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag not in flags | {"--set"}:
            yield word
            continue
        value = value if equals else next(rest, "")
        if flag not in flags and not _assigns(value, change):
            yield from (flag, value)


def _assigns(assignment: str, change: Change) -> bool:
    """Whether ``NAME=VALUE``, or ``part.NAME=VALUE``, is about an option that changes."""
    name = assignment.partition("=")[0].strip().rpartition(".")[2]
    return name.replace("-", "_") in change


def _flag(name: str) -> str:
    return "--" + name.strip("_").replace("_", "-")
