"""How every command shows its help: flags without a type, `-h`, and examples at the end."""

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from snapkv.cli.examples import EXAMPLES

SETTINGS = {"help_option_names": ["-h", "--help"]}
"""What the program tells all of its commands."""


class _Shown:
    """A command whose flags have nothing behind them, since nothing is to be given there."""

    def get_params(self, context: Any) -> list[Any]:
        """As ever; a flag's type is not shown."""
        found: list[Any] = super().get_params(context)  # type: ignore[misc] # of what is mixed in
        for parameter in found:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return found


class _ShownCommand(_Shown, TyperCommand):
    pass


class _ShownGroup(_Shown, TyperGroup):
    pass


def with_examples(app: typer.Typer, words: tuple[str, ...] = ()) -> typer.Typer:
    """The program, or a group of commands under these words, with the help of every command set.

    Raises:
        KeyError: a command has no examples.
    """
    app.info.cls, app.info.epilog = _ShownGroup, _epilog(words)
    for command in app.registered_commands:
        name = str(command.name or getattr(command.callback, "__name__", ""))
        command.cls, command.epilog = _ShownCommand, _epilog((*words, name))
    for group in app.registered_groups:
        if group.typer_instance is not None:
            with_examples(group.typer_instance, (*words, str(group.typer_instance.info.name)))
    return app


def _epilog(words: tuple[str, ...]) -> str:
    """Examples, a line each."""
    examples = EXAMPLES[" ".join(words)]
    return "\n".join(("Example:" if len(examples) == 1 else "Examples:", *examples))
