"""Turn the fields of dataclasses into the options of a command."""

import copy
import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from snapkv.validation import require_each_at_least
from snapkv_app.cli.amounts import TokenBudgetParameter, WholeNumber, counts
from snapkv_app.cli.outputs import Output, require_outputs

Command = Callable[..., None]
Mark = TypeVar("Mark")


def with_options(
    kind: type, *, settings: type | None = None, panel: str = "", hidden: Collection[str] = ()
) -> Callable[[Command], Command]:
    """Return a decorator that gives a command an option for each field of a dataclass.

    The command must have a keyword argument `options`, and gets an instance for it. Before the
    command begins, whole numbers such as 4k are parsed and output paths are checked, which raises
    InvalidArgumentError; the dataclass may raise, too.

    Args:
        kind: the dataclass, whose fields are annotated as typer expects it.
        settings: another dataclass, of which the command gets an instance as `settings`; see
            `field_options`. The first line of its docstring is the help of a command without a
            docstring. The help of other commands is their docstring up to its `Raises:`.
        panel: the panel of the help that lists the fields of `settings`.
        hidden: the fields of `settings` that are not options.
    """
    hints = get_type_hints(kind, include_extras=True)
    of_options = [_keyword(field.name, field.default, hints[field.name]) for field in fields(kind)]
    of_settings = field_options(settings, panel=panel, hidden=hidden) if settings else []

    def add_options(command: Command) -> Command:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.name not in ("options", "settings")]
        parameters = [_with_metavar(p) for p in (*own, *of_settings, *of_options)]
        outputs = {p.name: output for p in of_options if (output := _mark(p, Output))}
        numbers = {p.name: number for p in parameters if (number := _mark(p, WholeNumber))}

        @functools.wraps(command)
        def with_every_option(**given: Any) -> None:
            for name, number in numbers.items():
                if given[name] is not None:
                    given[name] = number.read(name, str(given[name]))
            require_outputs(outputs, given)
            options = kind(**{p.name: given.pop(p.name) for p in of_options})
            if settings is not None:
                values = {p.name: given.pop(p.name) for p in of_settings}
                given["settings"] = from_options(settings, values)
            command(**given, options=options)

        text = command.__doc__ or (settings.__doc__ or "").partition("\n")[0]
        with_every_option.__doc__ = inspect.cleandoc(text).partition("\n\nRaises:")[0]
        vars(with_every_option)["__signature__"] = signature.replace(parameters=parameters)
        with_every_option.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_every_option

    return add_options


def _keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _mark(parameter: inspect.Parameter, kind: type[Mark]) -> Mark | None:
    """Return the mark of class `kind` in the annotation of an option, or None without one."""
    return next((each for each in get_args(parameter.annotation) if isinstance(each, kind)), None)


def _with_metavar(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter whose help shows a type in capitals, or the allowed words.

    The type of a whole number becomes a text, which `WholeNumber.read` parses, so that 4k works.
    Arguments, flags and parameters with the type Any are returned unchanged.
    """
    hint, info, *marks = get_args(parameter.annotation) or (None, None)
    kinds = get_args(hint) or (hint,)
    if not isinstance(info, OptionInfo) or bool in kinds or hint is Any:
        return parameter
    shown_info, default = copy.copy(info), parameter.default
    if hint in (int, int | None):
        shown_info.metavar = info.metavar or "INTEGER"
        hint, marks = (str if hint is int else str | None), marks or [WholeNumber()]
        default = default if default in (None, parameter.empty) else str(default)
    elif not info.metavar:
        is_choice = get_origin(hint) is Literal
        shown_info.metavar = (
            "|".join(kinds) if is_choice else "NUMBER" if float in kinds else "TEXT"
        )
    return parameter.replace(annotation=Annotated[hint, shown_info, *marks], default=default)


def field_options(
    kind: type, *, panel: str, hidden: Collection[str] = ()
) -> list[inspect.Parameter]:
    """Return a keyword parameter, as typer expects it, for each field that the constructor takes.

    The help of an option comes from ``Args:`` in the docstring of the class. A tuple is typed as a
    text with commas between the items, see `from_options`.

    Args:
        kind: the dataclass.
        panel: the panel of the help that lists the options.
        hidden: the names of fields that are left out.

    Raises:
        TypeError: a field has no default that the help could show.
        KeyError: a field is missing in ``Args:``.
    """
    hints, help_texts = get_type_hints(kind), documented_arguments(kind)
    parameters = []
    for field in fields(kind):
        if not field.init or field.name in hidden:
            continue
        hint, default = hints[field.name], field.default
        if default is MISSING:
            raise TypeError(f"the field {kind.__name__}.{field.name} does not have a default value")
        marks: list[WholeNumber] = []
        metavar = None
        if get_origin(hint) is tuple:
            metavar = "INTEGER,..." if get_args(hint)[0] is int else "TEXT,..."
            hint, default = str | None, ",".join(map(str, default)) or None
        elif hint == int | str:  # a budget, which may be in bytes
            hint, marks, metavar = Any, [TokenBudgetParameter()], "INTEGER|auto|12%|64MiB"
        elif hint in (int, int | None):
            marks = [WholeNumber(0, is_counted=field.name != "seed")]
        option = typer.Option(
            *_flags(field, hint),
            help=help_texts[field.name],
            rich_help_panel=panel,
            metavar=metavar,
        )
        parameters.append(_keyword(field.name, default, Annotated[hint, option, *marks]))
    return parameters


def _flags(field: Field[Any], hint: Any) -> tuple[str, ...]:
    """Return the flags for a field: the one in its metadata, or none to use the field's name.

    A flag of its own is needed if the name is already taken. A Boolean also gets ``--no-FLAG``.
    """
    flag = field.metadata.get("flag")
    if flag is None:
        return ()
    return (f"{flag}/--no-{flag.removeprefix('--')}" if hint is bool else flag,)


def from_options(kind: type, given: Mapping[str, Any]) -> Any:
    """Build an instance of a dataclass from the values of the options of `field_options`.

    Raises:
        InvalidArgumentError: a list of whole numbers cannot be parsed or has a negative one. The
            dataclass may raise further errors.
    """
    hints, values = get_type_hints(kind), dict(given)
    for name, text in given.items():
        if get_origin(hints[name]) is tuple:
            values[name] = _items(name, text or "", get_args(hints[name])[0])
    return kind(**values)


def _items(name: str, text: str, kind: type) -> tuple[Any, ...]:
    if kind is str:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if numbers := counts(name, text):
        require_each_at_least(name, numbers, 0)
    return numbers


def documented_arguments(kind: type) -> dict[str, str]:
    """Return the text of each argument under ``Args:`` in the docstrings of a class and its bases.

    Each text is joined to one line, without a full stop at its end.
    """
    known = documented_arguments(kind.__base__) if kind.__base__ else {}
    text = inspect.cleandoc(vars(kind).get("__doc__") or "")
    section = re.search(r"^ *Args:\n(.*?)(?:\n\s*\n|\Z)", text, re.S | re.M)
    found = re.findall(
        r"^    (\w+): (.*?)(?=^    \w|\Z)", section.group(1) if section else "", re.S | re.M
    )
    return known | {name: " ".join(text.split()).rstrip(".") for name, text in found}
