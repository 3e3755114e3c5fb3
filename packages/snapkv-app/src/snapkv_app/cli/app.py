"""The command `snapkv` with its sub-commands, their help, exit statuses and one-line errors."""

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
    wrong,
)
from snapkv.validation import without_controls
from snapkv_app.cli.interrupts import say_interrupted
from snapkv_app.cli.standard_output import messages_shown, named_output, write_json

_FAILURE, _BAD_INPUT = 1, 2

_COMPLETES = "_SNAPKV_COMPLETE"
"""The environment variable that the completion script of a shell sets."""

# The base class of typer's parsing errors, for which typer exports no name.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

_OWN = ("demo", "ask", "generate", "chat", "inspect", "plan", "policies", "config", "serve")
_COMMANDS = {name: f"snapkv_app.cli.{name}:{name}" for name in _OWN}
_COMMANDS |= {"generate": "snapkv_app.cli.ask:generate", "library": "snapkv_app.cli.library:app"}
"""The built-in commands and groups of commands, written as entry points.

Other packages may register more. The module of a command may define `EXAMPLES`, with one or two
lines for each command in it. The package of that module may define `SUMMARIES`, with one line for
each command, so that the help lists the commands without importing them.
"""

_EXAMPLES = {"": ("snapkv demo", 'snapkv ask contract.pdf -q "Who may end it?"')}

_ELSEWHERE = dict.fromkeys(("eval", "bench", "study", "medusa"), "snapkv-lab")
_ELSEWHERE["serve"] = "snapkv-vllm"
"""The package that each command which is not part of this package needs."""

_PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True}
"""The settings of a command that passes unknown options on to another program."""


def program(*names: str) -> typer.Typer:
    """Import the named commands, or all without a name, and return a program with them.

    Raises:
        KeyError: there is no command with one of the names.
        MissingDependencyError: a command cannot be imported.
    """
    return _program(names or _places())


def _program(names: Iterable[str]) -> typer.Typer:
    """Import the named commands, which may be none, and return a program with them alone.

    Raises:
        KeyError: there is no command with one of the names.
        MissingDependencyError: a command cannot be imported.
    """
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
        command, own_examples = _import_command(name)
        examples |= own_examples
        if isinstance(command, typer.Typer):
            found.add_typer(command)
        else:
            found.command(context_settings=_PASSED_ON if name == "serve" else None)(command)
    _show_help(found, examples)
    return found


def _import_command(name: str) -> tuple[Any, dict[str, tuple[str, ...]]]:
    """Import a command and its examples.

    Returns:
        The function or the group of the command, and the examples by name of the command.

    Raises:
        MissingDependencyError: the command cannot be imported, which may happen if another package
            registered it.
    """
    place = _place(name)
    home, _, attribute = place.partition(":")
    try:
        module = importlib.import_module(home)
        return getattr(module, attribute), getattr(module, "EXAMPLES", {})
    except SnapKVError:
        raise
    except Exception as error:
        raise wrong(
            name,
            f"the command cannot be imported from {place} ({type(error).__name__}: {error})",
            "Install the package of this command again, or uninstall it",
            MissingDependencyError,
        ) from error


def _place(name: str) -> str:
    """Return the entry point of a command, as "module:attribute".

    Raises:
        KeyError: there is no such command.
    """
    return _COMMANDS.get(name) or _places()[name]


@functools.cache
def _places() -> dict[str, str]:
    """Return the entry point of every command, as "module:attribute", by the name of the command.

    The commands that other installed packages have registered are included; one with the name of a
    built-in command is ignored. Later calls return the same dict, which the caller must not change.
    """
    from importlib.metadata import entry_points  # slow to import

    registered = {point.name: point.value for point in entry_points(group="snapkv.commands")}
    return registered | _COMMANDS  # no package can replace a built-in command


def _summary(name: str) -> str:
    """Return the line of a command in the list of commands, or why it cannot be imported.

    A line in `SUMMARIES` is taken without importing the command.
    """
    package = _place(name).partition(":")[0].rpartition(".")[0]
    try:
        summaries = getattr(importlib.import_module(package), "SUMMARIES", {}) if package else {}
        return str(summaries[name] if name in summaries else _command(name).help)
    except Exception as error:
        return str(error)


class _CommandList(Mapping[str, TyperCommand]):
    """Every command by name, with its name and summary only, so that none is imported."""

    def __iter__(self) -> Iterator[str]:
        return iter(_places())

    def __len__(self) -> int:
        return len(_places())

    def __getitem__(self, name: str) -> TyperCommand:
        _place(name)
        return TyperCommand(name=name, help=_summary(name))


class _FlagsWithoutType:
    """A mixin for commands and groups, whose help shows no type after flags."""

    def get_params(self, context: Any) -> list[Any]:
        """Return the parameters of the base class, in which flags have lost their type in place."""
        parameters: list[Any] = super().get_params(context)  # type: ignore[misc] # the other base's
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class _CommandWithDefaults(_FlagsWithoutType, TyperCommand):
    """A command that uses the defaults of the user and refuses a repeated option.

    An option that takes several values may be repeated.
    """

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        """Check for repeated options, then parse with the defaults of the user.

        Raises:
            InvalidArgumentError: an option is repeated, or a default is not valid.
            _UsageError: an option is unknown or lacks its value, or an argument is missing.
        """
        from snapkv_app.cli.defaults import defaults_for  # not needed for the list of commands

        typed, _, given = self.make_parser(context).parse_args(args=list(args))
        for option in given:
            takes_one = not (option.multiple or getattr(option, "is_flag", False))
            if takes_one and (times := given.count(option)) > 1:
                problem = f"the option {option.opts[0]} is used {times} times"
                raise wrong(option.name, problem, "Use this option only once")
        options = {each.name: each for each in self.params if each.param_type_name == "option"}
        found = defaults_for(str(self.name), options.keys(), typed)
        context.default_map = {
            name: [text] if options[name].multiple else text for name, text in found.items()
        }
        return super().parse_args(context, args)


class _Group(_FlagsWithoutType, TyperGroup):
    pass


class _LazyGroup(_Group):
    """The group of all commands, which imports a command only when it is called.

    `eval` and `study` import the modules of their experiments to declare their options, and no
    other command needs these modules.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _CommandList()  # type: ignore[assignment] # never changed

    def resolve_command(self, context: Any, arguments: list[str]) -> Any:
        """Find and import the command that the first of the arguments names.

        Returns:
            The name, the imported command and the remaining arguments.

        Raises:
            MissingDependencyError: the command cannot be imported.
            _UsageError: there is no such command.
        """
        name, found, rest = super().resolve_command(context, arguments)
        return name, found and _command(str(name)), rest


def _show_help(
    app: typer.Typer, examples: Mapping[str, tuple[str, ...]], words: tuple[str, ...] = ()
) -> None:
    """Set the classes of a group and its commands, and put examples at the end of their help.

    Args:
        app: the group, which is changed in place, with the groups in it.
        examples: the lines of examples, by the words that call a command.
        words: the words that call the group.
    """

    def end(*more: str) -> str | None:
        lines = examples.get(" ".join((*words, *more)), ())
        heading = "Examples:" if lines[1:] else "Example:"
        return "\n".join((heading, *lines)) if lines else None

    app.info.cls, app.info.epilog = _Group, end()
    for command in app.registered_commands:
        name = str(command.name or getattr(command.callback, "__name__", ""))
        command.cls, command.epilog = _CommandWithDefaults, end(name)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            name = str(group.typer_instance.info.name)
            _show_help(group.typer_instance, examples, (*words, name))


def _show_version(is_requested: bool) -> None:
    if is_requested:
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
    """Run a command line, flush its output and report its error in one line.

    Args:
        arguments: the command line, without the name of the program.

    Returns:
        The exit status: 0, 1 for a failure, 2 for bad input, 3 if ``--check`` found a difference,
        or 130 after an interruption. All errors are reported here and not raised.

    Raises:
        SystemExit: the shell asks for the completion of a command line.
    """
    try:
        with named_output() as output, messages_shown():
            try:
                return _run(arguments)
            except (SnapKVError, _UsageError) as error:
                if "--json" in arguments and not output.has_written:
                    _print_json_error(error)
                raise
    except BrokenPipeError:
        return _FAILURE  # the reader closed the pipe on purpose
    except SnapKVError as error:
        is_failure = isinstance(error, OutOfMemoryError | OutputError)
        return _fail(str(error), _FAILURE if is_failure else _BAD_INPUT)
    except _UsageError as error:
        return _fail(_in_words(error), _BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        return say_interrupted(arguments)
    except Exception as error:
        return _explain(error, arguments)


def _run(arguments: list[str]) -> int:
    """Run a command and return its exit status; `run` prints the errors, not typer.

    Raises:
        InvalidArgumentError: an argument contains a NUL byte, or the command needs a package that
            is not installed.
        SnapKVError: the command has raised it.
        SystemExit: the shell asks for the completion of a command line.
    """
    for text in arguments:
        if "\0" in text:
            problem = f"an argument cannot contain a NUL byte, but got {text!r}"
            raise wrong("arguments", problem, "Remove the NUL byte")
    if _COMPLETES in os.environ:
        _parser().main(arguments, prog_name="snapkv", complete_var=_COMPLETES)
    name = arguments[0] if arguments else ""
    package = _ELSEWHERE.get(name)
    if package and not find_spec(package.replace("-", "_")):
        problem = f"this command is part of the package {package}, which is not installed"
        raise wrong(name, problem, f"Run pip install {package}")
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
    """Return the message of a parsing error of typer, with an example if an argument is missing.

    If a command or an option is unknown, the message names the help.
    """
    message = str(getattr(error, "format_message", error.__str__)()).replace("Value error, ", "")
    context = getattr(error, "ctx", None)
    if message.startswith("Missing") and context is not None and context.command.epilog:
        example = context.command.epilog.splitlines()[1]
        return f"{message.rstrip('.')}. For example, run {example}."
    path = "snapkv" if context is None else context.command_path
    if not message or message.startswith("No such"):
        return f"{message.rstrip('.') or 'A command is missing'}. See {path} --help."
    return message


def _explain(error: BaseException, arguments: list[str]) -> int:
    """Report an unexpected error in one line, or the interruption that caused it.

    With ``--verbose``, the traceback is printed before it.

    Returns:
        The exit status: 130 for an interruption, and else 1.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt):
            return say_interrupted(arguments)
        cause = cause.__cause__ or cause.__context__
    if "--verbose" in arguments:
        traceback.print_exc()
    name = type(error).__name__
    message = f"unexpected {name}: {str(error).rstrip('.')}. Add --verbose to see the traceback."
    return _fail(message, _FAILURE)


def _print_json_error(error: Exception) -> None:
    """Print an error as a JSON object on standard output, for a program that reads it.

    The object has the only key "error", an object with "code", "argument" and "message". The code
    is the class of the error, such as ``PromptTooLongError``; a parsing error counts as
    ``InvalidArgumentError``. The argument is the word before the first colon of the message, or
    null.
    """
    refusal = error if isinstance(error, SnapKVError) else InvalidArgumentError(_in_words(error))
    argument, colon, _ = str(refusal).partition(":")
    named = argument if colon and argument.isidentifier() else None
    record = {"code": type(refusal).__name__, "argument": named, "message": str(refusal)}
    write_json({"error": record})


def _fail(message: str, status: int) -> int:
    line = without_controls(" ".join(message.split()))
    with contextlib.suppress(OSError):  # standard error may be on a full disk, too
        print(f"snapkv: error: {line}", file=sys.stderr, flush=True)  # noqa: T201
    return status
