"""Where the program begins, before anything heavy is imported."""

import contextlib
import os
import sys

from snapkv.cli.interrupts import say_interrupted, watch


def main() -> None:
    """Run the command line and exit with its status.

    0: done. 1: out of memory, a file or standard output that takes no more, or a fault of this
    program. 2: bad input, named in one line on standard error. 3: `--check` found an answer that is
    not the full cache's. 130: interrupted.
    """
    # Before torch is imported: threads that wait for work must not burn the cores meanwhile.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    watch()
    try:
        from snapkv.cli.app import run

        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        status = say_interrupted(sys.argv[1:])
    _let_go_of_output()
    sys.exit(status)


def _let_go_of_output() -> None:
    """Throw away what standard output did not take, which Python would try to write once more."""
    if sys.stdout is not None:
        try:
            sys.stdout.flush()
        except OSError:
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
