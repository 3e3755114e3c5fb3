"""The command `snapkv`: its sub-commands, their help, its exit status, its one-line errors."""

import contextlib
import functools
import importlib
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from snapkv import __version__
from snapkv.errors import (
    InvalidArgumentError,
    MissingDependencyError,
    OutOfMemoryError,
    OutputError,
    SnapKVError,
)
from snapkv.validation import without_controls
from snapkv_app.cli.interrupts import say_interrupted
from snapkv_app.cli.standard_output import has_written, messages_shown, named_output, write_json

_FAILURE, _BAD_INPUT = 1, 2

_COMPLETES = "_SNAPKV_COMPLETE"
"""The variable that a shell's completion scripts set."""

# The base class of typer's parsing errors, for which typer exports no name.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

_OWN = ("demo", "ask", "generate", "chat", "inspect", "plan", "policies", "config", "serve")
_COMMANDS = {name: f"snapkv_app.cli.{name}:{name}" for name in _OWN}
_COMMANDS |= {"generate": "snapkv_app.cli.ask:generate", "library": "snapkv_app.cli.library:app"}
"""Commands and groups of commands as entry points; other packages may register more.

The module of a command may define `EXAMPLES`: a line or two for each of its commands. Its package
may define `SUMMARIES`, one line for each command, so that help lists it without importing it.
"""

_EXAMPLES = {"": ("snapkv demo", 'snapkv ask contract.pdf -q "Who may end it?"')}

_ELSEWHERE = dict.fromkeys(("eval", "bench", "study", "medusa"), "snapkv-lab")
_ELSEWHERE["serve"] = "snapkv-vllm"
"""Commands that need another package, and which."""

_PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True}
"""Settings of a command that passes unknown options on to another program."""


def program(*names: str) -> typer.Typer:
    """The program with these commands, or with all commands imported."""
    return _program(names or _places())


def _program(names: Iterable[str]) -> typer.Typer:
    found = typer.Typer(
        name="snapkv",
        help="Answer over very long prompts with a small key-value cache.",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    found.callback()(_common)
    examples: dict[str, tuple[str, ...]] = dict(_EXAMPLES)
    for name in names:
        command, shown = _imported(name)
        examples |= shown
        if isinstance(command, typer.Typer):
            found.add_typer(command)
        else:
            found.command(context_settings=_PASSED_ON if name == "serve" else None)(command)
    _show_help(found, examples)
    return found


def _imported(name: str) -> tuple[Any, dict[str, tuple[str, ...]]]:
    """A command and its examples; a command of another package may fail to import."""
    place = _place(name)
    home, _, attribute = place.partition(":")
    try:
        module = importlib.import_module(home)
        return getattr(module, attribute), getattr(module, "EXAMPLES", {})
    except SnapKVError:
        raise
    except Exception as error:
        raise MissingDependencyError(
            f"{name}: expected a command that can be imported from {place}, got "
            f"{type(error).__name__}: {error}; install the package of this command again, or "
            "uninstall it"
        ) from error


def _place(name: str) -> str:
    return _COMMANDS.get(name) or _places()[name]


@functools.cache
def _places() -> dict[str, str]:
    """Where every command is defined; other packages cannot replace the built-in ones."""
    from importlib.metadata import entry_points  # slow to import

    brought = {point.name: point.value for point in entry_points(group="snapkv.commands")}
    return _COMMANDS | {name: place for name, place in brought.items() if name not in _COMMANDS}


def _summary(name: str) -> str:
    """A command's line in the list of commands; the error if it cannot be imported."""
    package = _place(name).partition(":")[0].rpartition(".")[0]
    try:
        told = getattr(importlib.import_module(package), "SUMMARIES", {}) if package else {}
        return str(told[name] if name in told else _command(name).help)
    except Exception as error:
        return str(error)


class _Listed(Mapping[str, TyperCommand]):
    """Every command by its name, with only what the list shows."""

    def __iter__(self) -> Iterator[str]:
        return iter(_places())

    def __len__(self) -> int:
        return len(_places())

    def __getitem__(self, name: str) -> TyperCommand:
        _place(name)
        return TyperCommand(name=name, help=_summary(name))


class _Shown:
    """A command whose help shows no type after a flag, since a flag takes no value."""

    def get_params(self, context: Any) -> list[Any]:
        """The same as the base class, without the type of flags."""
        found: list[Any] = super().get_params(context)  # type: ignore[misc] # of what is mixed in
        for parameter in found:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return found


class _ShownCommand(_Shown, TyperCommand):
    """A command with a user's defaults, which refuses an option that is given twice.

    An option that takes several values may be given again.
    """

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        """Parse as the base class does, after that check and with the user's defaults.

        Raises:
            InvalidArgumentError: an option is given twice, or a default is not valid.
        """
        from snapkv_app.cli.defaults import defaults_for  # not needed for the list of commands

        typed, _, given = self.make_parser(context).parse_args(args=list(args))
        for option in given:
            takes_one = not (option.multiple or getattr(option, "is_flag", False))
            if takes_one and (times := given.count(option)) > 1:
                raise InvalidArgumentError(
                    f"{option.name}: expected it once, got {option.opts[0]} {times} times; leave "
                    "all but one out"
                )
        options = {each.name: each for each in self.params if each.param_type_name == "option"}
        found = defaults_for(str(self.name), options.keys(), typed)
        context.default_map = {
            name: [text] if options[name].multiple else text for name, text in found.items()
        }
        return super().parse_args(context, args)


class _ShownGroup(_Shown, TyperGroup):
    pass


class _LazyGroup(_ShownGroup):
    """All commands; only the one that is called is imported.

    `eval` and `study` take their options from experiments, whose modules no other command needs.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _Listed()  # type: ignore[assignment] # nothing adds to it

    def resolve_command(self, context: Any, arguments: list[str]) -> Any:
        """The same as the base class, with the command imported."""
        name, found, rest = super().resolve_command(context, arguments)
        return name, found and _command(str(name)), rest


def _show_help(
    app: typer.Typer, examples: Mapping[str, tuple[str, ...]], words: tuple[str, ...] = ()
) -> None:
    """Set how the help of a group of commands looks, with examples at its end."""

    def end(*more: str) -> str | None:
        lines = examples.get(" ".join((*words, *more)), ())
        heading = "Examples:" if lines[1:] else "Example:"
        return "\n".join((heading, *lines)) if lines else None

    app.info.cls, app.info.epilog = _ShownGroup, end()
    for command in app.registered_commands:
        name = str(command.name or getattr(command.callback, "__name__", ""))
        command.cls, command.epilog = _ShownCommand, end(name)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            name = str(group.typer_instance.info.name)
            _show_help(group.typer_instance, examples, (*words, name))


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"snapkv {__version__}")
        raise typer.Exit


def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def run(arguments: list[str]) -> int:
    """Run a command line and flush its output; its exit status, see `snapkv_app.cli.main`."""
    try:
        with named_output(), messages_shown():
            return _run(arguments)
    except BrokenPipeError:
        return _FAILURE  # the reader closed the pipe on purpose
    except SnapKVError as error:
        return _refuse(error, arguments)
    except _UsageError as error:
        return _refuse(InvalidArgumentError(_in_words(error)), arguments)
    except (KeyboardInterrupt, typer.Abort):
        return say_interrupted(arguments)
    except Exception as error:
        return _explain(error, arguments)


def _run(arguments: list[str]) -> int:
    """Run a command; errors are raised for `run` to print, not printed by typer."""
    for text in arguments:
        if "\0" in text:
            raise InvalidArgumentError(
                f"arguments: expected texts without a NUL byte, got {text!r}; leave it out"
            )
    if _COMPLETES in os.environ:
        _parser().main(arguments, prog_name="snapkv", complete_var=_COMPLETES)
    name = arguments[0] if arguments else ""
    package = _ELSEWHERE.get(name)
    if package and not find_spec(package.replace("-", "_")):
        raise InvalidArgumentError(
            f"{name}: expected the package {package}, which has this command, got an "
            f"environment without it; pip install {package}"
        )
    command = _parser()
    try:
        with command.make_context("snapkv", list(arguments), obj=tuple(arguments)) as context:
            return command.invoke(context) or 0
    except typer.Exit as end:
        return end.exit_code


@functools.cache
def _parser() -> Any:
    found = _program(())
    found.info.cls = _LazyGroup
    return get_command(found)


@functools.cache
def _command(name: str) -> Any:
    group: Any = get_command(_program((name,)))
    return group.commands[name]


def _in_words(error: Exception) -> str:
    """The message of a parsing error; for a missing argument, with an example."""
    message = str(getattr(error, "format_message", error.__str__)()).replace("Value error, ", "")
    context = getattr(error, "ctx", None)
    if message.startswith("Missing") and context is not None and context.command.epilog:
        example = context.command.epilog.splitlines()[1]
        return f"{message.rstrip('.')}; write for instance {example}"
    path = "snapkv" if context is None else context.command_path
    if not message or message.startswith("No such"):
        return f"{message.rstrip('.') or 'a command is missing'}; see {path} --help"
    return message


def _explain(error: BaseException, arguments: list[str]) -> int:
    """Report an unexpected error, or an interruption that became one, in one line."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt):
            return say_interrupted(arguments)
        cause = cause.__cause__ or cause.__context__
    if "--verbose" in arguments:
        traceback.print_exc()
    name = type(error).__name__
    return _fail(f"unexpected {name}: {error}; --verbose shows where", _FAILURE)


def _refuse(error: SnapKVError, arguments: list[str]) -> int:
    """Report an error in one line, and with ``--json`` as an object if nothing was printed yet."""
    if "--json" in arguments and not has_written():
        _print_json_error(error)
    is_failure = isinstance(error, OutOfMemoryError | OutputError)
    return _fail(str(error), _FAILURE if is_failure else _BAD_INPUT)


def _print_json_error(error: SnapKVError) -> None:
    """Print an error as a JSON object, for a program that reads the output.

    The code is the class of the error, such as ``PromptTooLongError``, see `snapkv.errors`. The
    argument is the word before the message's first colon, or null.
    """
    argument, colon, _ = str(error).partition(":")
    named = argument if colon and argument.isidentifier() else None
    record = {"code": type(error).__name__, "argument": named, "message": str(error)}
    with contextlib.suppress(OSError, OutputError):  # standard output itself may have failed
        write_json({"error": record})


def _fail(message: str, status: int) -> int:
    line = without_controls(" ".join(message.split()))
    with contextlib.suppress(OSError):  # standard error may be on a full disk, too
        print(f"snapkv: error: {line}", file=sys.stderr, flush=True)  # noqa: T201
    return status
