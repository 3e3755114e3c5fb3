"""What vLLM calls in each of its processes, and how these end with the one that started them."""

import contextlib
import functools
import multiprocessing
import os
import select
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Names the folder through which processes count together, before prometheus_client is imported."""

PROCESS_NAME_PREFIXES = ("EngineCore", "VllmWorker-", "ApiServer_")
"""How the names of the processes that vLLM starts begin: engines, workers, several web servers."""

_OWN_FOLDER_VARIABLE = "SNAPKV_METRICS_DIR"
"""Names that folder once more, where it is one of `metrics_folder`."""


def register() -> None:
    """Make the compressed block spec known (entry point ``vllm.general_plugins``).

    Where processes count through files, these are written without a mapping, see `metric_files`.
    Nothing else happens until an engine asks for it. A process of a server that this package has
    started ends with its parent from here on; by vLLM's own command, from where its worker, its
    scheduler or its web application is made.
    """
    from snapkv_vllm.versions import is_supported_version

    if own_metrics_folder():
        end_with_parent()
    if METRICS_VARIABLE in os.environ:
        from snapkv_vllm.metric_files import write_without_mapping

        write_without_mapping()
    if is_supported_version():
        with contextlib.suppress(ImportError, AttributeError):  # an engine that asks for us is told
            from snapkv_vllm.blocks import register_spec

            register_spec()


@contextlib.contextmanager
def make_metrics_folder() -> Iterator[None]:
    """Have the processes that are started meanwhile count in a folder of their own.

    Raises InvalidArgumentError if there is no room for one.
    """
    from snapkv_vllm.metric_files import cannot_write, require_writable

    try:
        made = tempfile.TemporaryDirectory(prefix="snapkv-metrics-")
    except OSError as error:
        raise cannot_write(tempfile.tempdir or "a temporary folder", error) from error
    with made as folder:
        require_writable(folder)
        os.environ[METRICS_VARIABLE] = os.environ[_OWN_FOLDER_VARIABLE] = folder
        try:
            yield
        finally:
            for name in (
                METRICS_VARIABLE,
                _OWN_FOLDER_VARIABLE,
            ):  # what this process starts next has no such folder
                del os.environ[name]


@contextlib.contextmanager
def lock_users_folder() -> Iterator[None]:
    """Hold the folder that the user has named, in which the counts of two servers would add up.

    Raises InvalidArgumentError if another server holds it, or there is no room in it.
    """
    import fcntl

    from snapkv_vllm.admission.names import wrong
    from snapkv_vllm.metric_files import cannot_write, require_writable

    folder = os.environ[METRICS_VARIABLE]
    try:
        os.makedirs(folder, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            alone, got = "a folder of this server alone", f"'{folder}', which another one uses"
            raise wrong(
                METRICS_VARIABLE, alone, got, "leave it out, or name another folder"
            ) from None
        require_writable(folder)
        yield
    finally:
        os.close(handle)


def own_metrics_folder() -> Path | None:
    """The folder of `metrics_folder`, in it and in what was started there; None elsewhere."""
    folder = os.environ.get(_OWN_FOLDER_VARIABLE)
    return Path(folder) if folder and folder == os.environ.get(METRICS_VARIABLE) else None


def end_with_parent() -> None:
    """Watch the process that has started this one of vLLM's, and kill this one when that is gone.

    A process that is killed cannot stop its children: vLLM's engine would stay, and with it the
    memory that a successor needs, and the metrics. Where vLLM has not started this process (it may
    be a user's own that runs an engine), or the system cannot watch one that is no child (it takes
    Linux), nothing happens.
    """
    parent = multiprocessing.parent_process()
    of_vllm = multiprocessing.current_process().name.startswith(PROCESS_NAME_PREFIXES)
    if parent is not None and of_vllm and hasattr(os, "pidfd_open"):
        _watch(parent.pid)


@functools.cache  # a forked process has another parent
def _watch(process: int) -> None:
    threading.Thread(target=_kill_after, args=(process,), daemon=True).start()


def _kill_after(process: int) -> None:
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        pass  # it went before it could be watched
    else:
        ended = select.poll()  # not select.select, which takes no handle above 1023
        ended.register(handle, select.POLLIN)
        ended.poll()
    if folder := own_metrics_folder():
        shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)
