"""The command `snapkv`: its sub-commands, its exit status, its one-line errors."""

import contextlib
import importlib
import os
import sys
import traceback
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Annotated

import typer
from typer.main import get_command

from snapkv import __version__
from snapkv.cli import interrupts
from snapkv.cli.examples import EXAMPLES
from snapkv.cli.help import SETTINGS, with_examples
from snapkv.cli.standard_output import named_output
from snapkv.errors import InvalidArgumentError, OutOfMemoryError, OutputError, SnapKVError

_FAILURE, _BAD_INPUT = 1, 2

_COMPLETES = "_SNAPKV_COMPLETE"
"""What the scripts of `--install-completion` set when a shell asks what may follow."""

# What argument parsing raises; typer exports no name for the whole family.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

_COMMANDS = ("demo", "ask", "generate", "chat", "inspect", "plan", "policies", "serve")
"""Each is a function in the module of its name."""

_GROUPS = ("library",)
"""Commands that have commands: the `app` of the module of that name."""

_ELSEWHERE = dict.fromkeys(("eval", "bench", "study", "medusa", "leaderboard"), "snapkv-lab")
_ELSEWHERE["serve"] = "snapkv-vllm"
"""Commands that need another package, and which."""

_PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True}
"""Of a command that takes options of another program."""


def program(*names: str) -> typer.Typer:
    """The program with these commands alone, or with all of them.

    A command line imports what its command needs: the options of `eval` and `study` are those of
    experiments, whose modules no other command has a use for.
    """
    found = typer.Typer(
        name="snapkv",
        help="Answer over very long prompts with a small key-value cache.",
        no_args_is_help=True,
        context_settings=SETTINGS,
        pretty_exceptions_enable=False,
    )
    found.callback()(_common)
    brought = _brought()
    for name in names or (*_COMMANDS, *_GROUPS, *brought):
        if name in brought:
            command = brought[name].load()
        else:
            module = importlib.import_module(f"snapkv.cli.{name}")
            command = module.app if name in _GROUPS else getattr(module, name)
        if isinstance(command, typer.Typer):
            found.add_typer(command)
        else:
            found.command(context_settings=_PASSED_ON if name == "serve" else None)(command)
    return with_examples(found)


def _brought() -> dict[str, EntryPoint]:
    """The commands of other installed packages, by name; ours stay ours."""
    points = entry_points(group="snapkv.commands")
    return {point.name: point for point in points if point.name not in (*_COMMANDS, *_GROUPS)}


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
    """The exit status of a command line, see `snapkv.cli.main`; all that it printed is flushed."""
    try:
        with named_output():
            return _run(arguments)
    except BrokenPipeError:
        return _FAILURE  # who read it has left, and knows
    except (OutOfMemoryError, OutputError) as error:
        return _fail(str(error), _FAILURE)
    except SnapKVError as error:
        return _fail(str(error), _BAD_INPUT)
    except _UsageError as error:
        return _fail(_in_words(error), _BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        return interrupts.say(arguments)
    except Exception as error:
        return _explain(error, arguments)


def _run(arguments: list[str]) -> int:
    """Run a command; what typer itself would print about its end is left to `run`."""
    for text in arguments:
        if "\0" in text:
            raise InvalidArgumentError(
                f"arguments: expected texts without a NUL byte, got {text!r}; leave it out"
            )
    if _COMPLETES in os.environ:
        get_command(program()).main(arguments, prog_name="snapkv", complete_var=_COMPLETES)
    brought = _brought()
    known = arguments[:1] if {*arguments[:1]} <= {*_COMMANDS, *_GROUPS, *brought} else []
    package = _ELSEWHERE.get(arguments[0]) if arguments else None
    if package and not find_spec(package.replace("-", "_")):
        raise InvalidArgumentError(
            f"{arguments[0]}: expected the package {package}, which brings this command, got an "
            f"environment without it; pip install {package}"
        )
    command = get_command(program(*known))
    try:
        with command.make_context("snapkv", list(arguments), obj=tuple(arguments)) as context:
            return command.invoke(context) or 0
    except typer.Exit as end:
        return end.exit_code


def _in_words(error: Exception) -> str:
    """What argument parsing says; of what is missing, how a command line has it."""
    message = str(getattr(error, "format_message", error.__str__)()).replace("Value error, ", "")
    context = getattr(error, "ctx", None)
    if message.startswith("Missing") and context is not None:
        (example, *_) = EXAMPLES[context.command_path.removeprefix("snapkv").strip()]
        return f"{message.rstrip('.')}; write for instance {example}"
    return message or "a command is missing; see snapkv --help"


def _explain(error: Exception, arguments: list[str]) -> int:
    """Say in one line what nobody foresaw."""
    if interrupts.caused(error):
        return interrupts.say(arguments)
    if "--verbose" in arguments:
        traceback.print_exc()
    name = type(error).__name__
    return _fail(f"unexpected {name}: {error}; --verbose shows where", _FAILURE)


def _fail(message: str, status: int) -> int:
    with contextlib.suppress(OSError):  # a full disk may be where errors go, too
        print(f"snapkv: error: {' '.join(message.split())}", file=sys.stderr, flush=True)  # noqa: T201
    return status
