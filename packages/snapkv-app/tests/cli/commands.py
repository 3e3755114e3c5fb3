"""Every command of the program, with its options as they are declared."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from snapkv_app.cli.amounts import WholeNumber
from snapkv_app.cli.app import program

GIVEN = {
    "files": ("{document}",),
    "sources": ("{document}",),
    "library": ("no-library",),
    "names": ("notes",),
    "size": ("1GiB",),
    "question": ("--question", "Why?"),
    "document": ("--document", "{document}"),
    "context": ("--context", "8k"),
    "model": ("demo",),
}
"""What a command cannot be called without."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A parameter of a command.

    Attributes:
        kind: its type; for one that may be left out, and for a list, that of what is given.
        marks: metadata of its type.
    """

    name: str
    flag: str
    kind: Any
    marks: tuple[Any, ...]
    required: bool

    @property
    def shown_kind(self) -> str:
        """What its help says that it takes, of lists what stands between the commas."""
        if self.kind is bool:
            return "nothing"
        found = str(self.marks[0].metavar)
        return next((kind for kind in ("INTEGER", "NUMBER") if found.startswith(kind)), "TEXT")

    def mark(self, kind: type) -> Any:
        return next((mark for mark in self.marks if isinstance(mark, kind)), None)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command and how it is called."""

    words: tuple[str, ...]
    options: tuple[Option, ...]
    callback: Callable[..., None]
    epilog: str

    @property
    def examples(self) -> list[str]:
        return self.epilog.splitlines()[1:]

    def call(self, *more: str, document: Any) -> list[str]:
        needed = [GIVEN[option.name] for option in self.options if option.required]
        texts = [text.format(document=document) for part in needed for text in part]
        if self.words == ("ask",):  # which takes them, or a library
            texts += [str(document)]
        if self.words == ("eval", "lm-eval"):  # which says by itself that it needs some
            texts += ["--tasks", "squadv2"]
        return [*self.words, *texts, *map(str, more)]

    def __str__(self) -> str:
        return " ".join(self.words)


def commands(group: Any = None, before: tuple[str, ...] = ()) -> Iterator[Command]:
    group = group or program()
    for each in group.registered_commands:
        words = (*before, each.name or each.callback.__name__)
        options = tuple(_options(each.callback))
        yield Command(words=words, options=options, callback=each.callback, epilog=each.epilog)
    for each in group.registered_groups:
        yield from commands(each.typer_instance, (*before, each.typer_instance.info.name))


def options_of(wanted: Callable[[Option], Any]) -> list[tuple[Command, Option]]:
    return [(command, each) for command in commands() for each in command.options if wanted(each)]


def _options(callback: Any) -> Iterator[Option]:
    for name, parameter in inspect.signature(callback, eval_str=True).parameters.items():
        if get_origin(parameter.annotation) is not Annotated:
            continue  # typer's context
        hint, *marks = get_args(parameter.annotation)
        written = (marks[0].default, *(marks[0].param_decls or ()))
        flags = [text for text in written if isinstance(text, str) and text.startswith("--")]
        yield Option(
            name=name,
            flag=next(iter(flags), f"--{name.replace('_', '-')}"),
            kind=int if any(isinstance(mark, WholeNumber) for mark in marks) else _kind(hint),
            marks=tuple(marks),
            required=parameter.default is inspect.Parameter.empty,
        )


def _kind(hint: Any) -> Any:
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    return _kind(kinds[0]) if kinds and not isinstance(kinds[0], str) else hint
