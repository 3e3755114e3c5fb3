"""Ctrl-C: a short line and status 130 from the first moment on, and no traceback."""

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

STATUS = 130

_CONTINUED = ("eval", "leaderboard", "study", "medusa", "library add")
"""How commands begin that go on, when they are called again, where they were stopped."""


def watch() -> None:
    """From now on, and until `started`, leave at once where modules are being imported.

    Libraries that are interrupted in the middle of an import say so in their own ways, some with a
    traceback that nobody can catch. Nothing has been begun then that would have to be ended.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, _leave_imports)


def started() -> None:
    """Something has begun that must be ended in order: Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _leave_imports:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def say(arguments: Sequence[str]) -> int:
    """Say that the command was interrupted, and whether it continues; its status."""
    with contextlib.suppress(OSError):
        print(_line(arguments), file=sys.stderr, flush=True)  # noqa: T201
    return STATUS


def continues(arguments: Sequence[str]) -> bool:
    """Whether a command goes on where it was stopped, when it is called again."""
    typed = " ".join(arguments[:2])
    return any(f"{typed} ".startswith(f"{command} ") for command in _CONTINUED)


def caused(error: BaseException | None) -> bool:
    """Whether an error is what a library has made of an interruption."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _line(arguments: Sequence[str]) -> str:
    if continues(arguments):
        return "snapkv: interrupted; the same command continues where it stopped"
    return "snapkv: interrupted"


def _leave_imports(number: int, frame: FrameType | None) -> None:
    del number
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            os.write(2, f"{_line(sys.argv[1:])}\n".encode())
            os._exit(STATUS)
        frame = frame.f_back
    raise KeyboardInterrupt
