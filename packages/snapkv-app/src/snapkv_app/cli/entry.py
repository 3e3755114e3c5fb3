"""The entry point of the program, which imports nothing that is slow to import."""

import contextlib
import os
import sys

from snapkv_app.cli.interrupts import say_interrupted, watch


def main() -> None:
    """Run the command line and exit with its status.

    The status is 0 for success; 1 if memory ran out, a write to a file or to standard output
    failed, or the program has a bug; 2 for bad input, which one line on standard error explains;
    3 if `--check` found an answer that differs from the answer of the full cache; and 130 after an
    interruption.
    """
    # Set before torch is imported. A waiting thread spins for some microseconds, the time between
    # two operations of a decode step, because waking it up takes longer than such an operation. It
    # must not spin longer, or it would take a core from other programs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    for name, mode in (("stdin", "r"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the stream is closed
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 # open until the end
    watch()
    try:
        from snapkv_app.cli.app import run

        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        status = say_interrupted(sys.argv[1:])
    _discard_output()
    sys.exit(status)


def _discard_output() -> None:
    """Flush standard output and standard error, and discard what cannot be written.

    Otherwise Python would try to write it again at exit, print an error and exit with 120.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
