"""Ends a process together with another one, as its engine with a killed replica."""

import os
import select
import signal
import threading

VARIABLE = "SNAPKV_LIVES_WITH"
"""Names, in the environment of a process and of those it starts, the process to end with."""


def end_together() -> None:
    """Watch the process that `VARIABLE` names, and kill this one when that one is gone.

    A process that is killed cannot stop its children: vLLM's engine would stay, and with it the
    memory that a successor needs. Without the variable, in the named process, and where the system
    cannot watch a process that is no child (it takes Linux), nothing happens.
    """
    other = int(os.environ.get(VARIABLE) or os.getpid())
    if other != os.getpid() and hasattr(os, "pidfd_open"):
        threading.Thread(target=_outlive, args=(other,), daemon=True, name="end-together").start()


def _outlive(process: int) -> None:
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        pass  # it went before it could be watched
    else:
        ended = select.poll()  # not select.select, which takes no handle above 1023
        ended.register(handle, select.POLLIN)
        ended.poll()
    os.kill(os.getpid(), signal.SIGKILL)
