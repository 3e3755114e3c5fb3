"""The entry point, before anything heavy is imported."""

import contextlib
import os
import sys

from snapkv_app.cli.interrupts import say_interrupted, watch


def main() -> None:
    """Run the command line and exit with its status.

    0: done. 1: out of memory, a failed write to a file or standard output, or a bug of this
    program. 2: bad input, named in one line on standard error. 3: `--check` found an answer that
    differs from the full cache's. 130: interrupted.
    """
    # Set before torch is imported: waiting threads must not spin on the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    for name, mode in (("stdin", "r"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: there is nothing to read, nobody is told
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 # as long as it runs
    watch()
    try:
        from snapkv_app.cli.app import run

        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        status = say_interrupted(sys.argv[1:])
    _let_go_of_output()
    sys.exit(status)


def _let_go_of_output() -> None:
    """Discard unwritten output, which Python would try to write again at exit."""
    if sys.stdout is not None:
        try:
            sys.stdout.flush()
        except OSError:
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
