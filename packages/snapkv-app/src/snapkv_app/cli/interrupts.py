"""End a command with exit status 130 after Ctrl-C, at once if modules are being imported."""

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

INTERRUPTED = 130

_CONTINUED = ("eval", "study", "medusa", "library add")
"""The first words of commands that continue where they stopped if they are run again."""


def watch() -> None:
    """Make Ctrl-C exit at once during imports, until `started` is called.

    Nothing happens if another handler than Python's is set, or Ctrl-C is ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave_imports)


def started() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from now on, so that open work is closed properly.

    Nothing happens if `watch` has set no handler.
    """
    if signal.getsignal(signal.SIGINT) is _leave_imports:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def say_interrupted(arguments: Sequence[str]) -> int:
    """Report the interruption on standard error, and whether the command can be continued.

    Args:
        arguments: the command line, without the name of the program.

    Returns:
        The exit status, 130; the caller must exit with it.
    """
    with contextlib.suppress(OSError):
        print(_line(arguments), file=sys.stderr, flush=True)  # noqa: T201
    return INTERRUPTED


def continues(arguments: Sequence[str]) -> bool:
    """Return whether the command continues where it stopped if it is run again."""
    typed = " ".join(arguments[:2])
    return any(f"{typed} ".startswith(f"{command} ") for command in _CONTINUED)


def _line(arguments: Sequence[str]) -> str:
    again = "; the same command continues where it stopped" if continues(arguments) else ""
    return f"snapkv: interrupted{again}"


def _leave_imports(number: int, frame: FrameType | None) -> None:
    """Exit at once if a module is being imported, and raise KeyboardInterrupt otherwise.

    Some libraries print a traceback that cannot be caught if their import is interrupted. At this
    point no work has begun that would have to be closed properly.
    """
    del number
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            os.write(2, f"{_line(sys.argv[1:])}\n".encode())
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt
