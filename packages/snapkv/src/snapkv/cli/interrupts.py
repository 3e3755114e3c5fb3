"""Ctrl-C ends a command with status 130, and leaves imports at once."""

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

INTERRUPTED = 130

_CONTINUED = ("eval", "study", "medusa", "library add")
"""How commands begin that go on, when they are called again, where they were stopped."""


def watch() -> None:
    """Have Ctrl-C leave imports at once; where it is ignored, it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave_imports)


def started() -> None:
    """Something has begun that must be ended in order: Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _leave_imports:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def say_interrupted(arguments: Sequence[str]) -> int:
    """Say that the command was interrupted, and whether it continues; its status."""
    with contextlib.suppress(OSError):
        print(_line(arguments), file=sys.stderr, flush=True)  # noqa: T201
    return INTERRUPTED


def continues(arguments: Sequence[str]) -> bool:
    """Whether a command goes on where it was stopped, when it is called again."""
    typed = " ".join(arguments[:2])
    return any(f"{typed} ".startswith(f"{command} ") for command in _CONTINUED)


def _line(arguments: Sequence[str]) -> str:
    again = "; the same command continues where it stopped" if continues(arguments) else ""
    return f"snapkv: interrupted{again}"


def _leave_imports(number: int, frame: FrameType | None) -> None:
    """Leave at once where modules are being imported.

    Libraries that are interrupted in the middle of an import say so in their own ways, some with a
    traceback that nobody can catch. Nothing has been begun then that would have to be ended.
    """
    del number
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            os.write(2, f"{_line(sys.argv[1:])}\n".encode())
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt
