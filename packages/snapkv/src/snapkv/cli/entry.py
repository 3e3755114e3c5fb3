"""Where the program begins, before anything heavy is imported; Ctrl-C ends it with status 130."""

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

INTERRUPTED = 130

_CONTINUED = ("eval", "study", "medusa", "library add")
"""How commands begin that go on, when they are called again, where they were stopped."""


def main() -> None:
    """Run the command line and exit with its status.

    0: done. 1: out of memory, a file or standard output that takes no more, or a fault of this
    program. 2: bad input, named in one line on standard error. 3: `--check` found an answer that is
    not the full cache's. 130: interrupted.
    """
    # Before torch is imported: threads that wait for work must not burn the cores meanwhile.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, _leave_imports)
    try:
        from snapkv.cli.app import run

        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        status = say_interrupted(sys.argv[1:])
    _let_go_of_output()
    sys.exit(status)


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


def _let_go_of_output() -> None:
    """Throw away what standard output did not take, which Python would try to write once more."""
    if sys.stdout is not None:
        try:
            sys.stdout.flush()
        except OSError:
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
