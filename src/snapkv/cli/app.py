"""The command `snapkv`: its sub-commands, its exit status, its one-line errors."""

import os
import sys
import traceback
from typing import Annotated

import typer

from snapkv import __version__
from snapkv.cli import bench, evaluate, medusa, study
from snapkv.cli.ask import ask
from snapkv.cli.chat import chat
from snapkv.cli.generate import generate
from snapkv.cli.inspect import inspect
from snapkv.cli.plan import plan
from snapkv.cli.policies import policies
from snapkv.cli.serve import serve
from snapkv.errors import OutOfMemoryError, SnapKVError

_FAILURE, _BAD_INPUT, _INTERRUPTED = 1, 2, 130

# What argument parsing raises; typer exports no name for the whole family.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="snapkv",
    help="Answer over very long prompts with a small key-value cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (ask, generate, chat, inspect, plan, policies):
    app.command()(command)
app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(serve)
app.add_typer(evaluate.app)
app.add_typer(bench.app)
app.add_typer(study.app)
app.add_typer(medusa.app)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"snapkv {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line and exit with its status.

    0: done. 1: out of memory, or a fault of this program. 2: bad input, named in one line on
    standard error. 130: interrupted.
    """
    # Before torch is imported: threads that wait for work must not burn the cores meanwhile.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit status of a command line; see `main`."""
    try:
        return app(arguments, prog_name="snapkv", standalone_mode=False) or 0
    except OutOfMemoryError as error:
        return _fail(str(error), _FAILURE)
    except SnapKVError as error:
        return _fail(str(error), _BAD_INPUT)
    except _UsageError as error:
        message = getattr(error, "format_message", error.__str__)()
        return _fail(message or "a command is missing; see snapkv --help", _BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    except Exception as error:
        if "--verbose" in arguments:
            traceback.print_exc()
        name = type(error).__name__
        return _fail(f"unexpected {name}: {error}; --verbose shows where", _FAILURE)


def _fail(message: str, status: int) -> int:
    print(f"snapkv: error: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201
    return status
