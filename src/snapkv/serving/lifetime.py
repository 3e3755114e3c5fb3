"""The processes of a server end with the one that started them, and take its folder along."""

import contextlib
import multiprocessing
import os
import select
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

METRICS = "PROMETHEUS_MULTIPROC_DIR"
"""Names the folder through which processes count together, before prometheus_client is imported."""

_OURS = "snapkv-metrics-"


@contextlib.contextmanager
def metrics_folder() -> Iterator[None]:
    """Have the processes that are started meanwhile count in a folder of their own."""
    with tempfile.TemporaryDirectory(prefix=_OURS) as folder:
        os.environ[METRICS] = folder
        try:
            yield
        finally:
            del os.environ[METRICS]  # what this process starts next has no such folder


def own_folder() -> Path | None:
    """The folder of `metrics_folder`, in it and in what was started there; None elsewhere."""
    folder = Path(os.environ.get(METRICS, ""))
    return folder if folder.name.startswith(_OURS) else None


def end_with_parent() -> None:
    """Watch the process that has started this one, and kill this one when that one is gone.

    A process that is killed cannot stop its children: vLLM's engine would stay, and with it the
    memory that a successor needs, and the metrics. Where Python's `multiprocessing` has not started
    this process, or the system cannot watch one that is no child (it takes Linux), nothing happens.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and hasattr(os, "pidfd_open"):
        watching = threading.Thread(target=_outlive, args=(parent.pid,), daemon=True)
        watching.start()


def _outlive(process: int) -> None:
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        pass  # it went before it could be watched
    else:
        ended = select.poll()  # not select.select, which takes no handle above 1023
        ended.register(handle, select.POLLIN)
        ended.poll()
    if folder := own_folder():
        shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)
