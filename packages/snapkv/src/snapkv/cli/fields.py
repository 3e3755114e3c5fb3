"""Options out of a dataclass: its fields are the options, its docstring their help."""

import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from snapkv.cli.amounts import counts
from snapkv.errors import InvalidArgumentError
from snapkv.validation import require_at_least, require_int

NAMES = {int: "INTEGER", float: "NUMBER", str: "TEXT"}
"""What stands in the help for a value of a type."""


def field_options(
    kind: type, *, panel: str, hidden: Collection[str] = ()
) -> list[inspect.Parameter]:
    """A keyword parameter for every field that the constructor takes, as typer reads them.

    Tuples are written as texts with commas between their items, see `from_options`. The `hidden`
    fields are left out.
    """
    hints, help_texts = get_type_hints(kind), documented_arguments(kind)
    parameters = []
    for field in fields(kind):
        if not field.init or field.name in hidden:
            continue
        hint, default = hints[field.name], field.default
        if default is MISSING:
            raise TypeError(f"{kind.__name__}.{field.name} has no default to show")
        metavar = None
        if get_origin(hint) is tuple:
            metavar = f"{NAMES[get_args(hint)[0]]},..."
            hint, default = str | None, ",".join(map(str, default)) or None
        option = typer.Option(
            *_flags(field, hint),
            help=help_texts[field.name],
            rich_help_panel=panel,
            metavar=metavar,
        )
        parameters.append(keyword(field.name, default, Annotated[hint, option]))
    return parameters


def _flags(field: Field[Any], hint: Any) -> tuple[str, ...]:
    """The flag that a field says for itself, where another option has that of its name."""
    flag = field.metadata.get("flag")
    if flag is None:
        return ()
    return (f"{flag}/--no-{flag.removeprefix('--')}" if hint is bool else flag,)


def keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    """A keyword parameter of a command."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def from_options(kind: type, given: Mapping[str, Any]) -> Any:
    """An instance of the dataclass out of what the options of `field_options` gave.

    Raises:
        InvalidArgumentError: a list with something in it that is not of its type, or a number
            beyond reason; what the dataclass itself refuses.
    """
    hints = get_type_hints(kind)
    values = {
        name: _items(name, value, get_args(hints[name])[0])
        if get_origin(hints[name]) is tuple
        else value
        for name, value in given.items()
    }
    for name, value in values.items():
        _require_reason(name, value)
    return kind(**values)


def _require_reason(name: str, value: Any) -> None:
    """Refuse whole numbers that no setting takes, before anything is imported to judge them."""
    for number in value if isinstance(value, tuple) else (value,):
        if type(number) is int:
            check = require_int if name == "seed" else require_at_least
            check(name, number, 0)


def integers(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them, see `snapkv.cli.amounts.count`.

    Raises:
        InvalidArgumentError: something else, or nothing.
    """
    numbers = counts(name, text)
    if not numbers:
        raise InvalidArgumentError(
            f"{name}: expected whole numbers with commas between them, got {text!r}; write for "
            f"instance --{name} 1024,4k"
        )
    return numbers


def documented_arguments(kind: type) -> dict[str, str]:
    """What docstrings say under ``Args:`` about each argument, on one line each.

    A class need not repeat what its bases say.
    """
    known = documented_arguments(kind.__base__) if kind.__base__ else {}
    text = inspect.cleandoc(vars(kind).get("__doc__") or "")
    section = re.search(r"^ *Args:\n(.*?)(?:\n\s*\n|\Z)", text, re.S | re.M)
    found = re.findall(
        r"^    (\w+): (.*?)(?=^    \w|\Z)", section.group(1) if section else "", re.S | re.M
    )
    return known | {name: " ".join(text.split()).rstrip(".") for name, text in found}


def _items(name: str, text: str | None, kind: type) -> tuple[Any, ...]:
    if kind is int:
        return counts(name, text or "")
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    return tuple(_item(name, part, kind) for part in parts)


def _item(name: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise InvalidArgumentError(
            f"{name}: expected items of type {kind.__name__} with commas between them, got {text!r}"
        ) from None
