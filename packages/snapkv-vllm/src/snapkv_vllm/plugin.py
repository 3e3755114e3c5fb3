"""The entry point of the plugin in each process of vLLM, and the folder of metrics."""

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
"""The environment variable of the folder in which several processes count together. It must be set
before prometheus_client is imported.
"""

PROCESS_NAME_PREFIXES = ("EngineCore", "VllmWorker-", "ApiServer_")
"""The first words of the names of vLLM's processes: engines, workers, and several web servers."""

_OWN_FOLDER_VARIABLE = "SNAPKV_METRICS_DIR"
"""The environment variable that has the same folder, if `make_metrics_folder` has made it."""


def register() -> None:
    """Register this plugin with vLLM in the current process (entry point ``vllm.general_plugins``).

    The block manager of the plugin is registered if the installed version of vLLM is supported. If
    several processes write their metrics to files, prometheus_client is patched to do this without
    a memory map; see `metric_files`. A process of a server that this package has started is killed
    from now on when its parent ends. With vLLM's own command this begins where the worker, the
    scheduler or the web application is built.
    """
    from snapkv_vllm.versions import is_supported_version

    if own_metrics_folder():
        end_with_parent()
    if METRICS_VARIABLE in os.environ:
        from snapkv_vllm.metric_files import write_without_mapping

        write_without_mapping()
    if is_supported_version():
        # An engine that uses this plugin reports these errors later.
        with contextlib.suppress(ImportError, AttributeError):
            from snapkv_vllm.blocks import register_spec

            register_spec()


@contextlib.contextmanager
def make_metrics_folder() -> Iterator[None]:
    """Make a temporary folder for metrics, which is used by all processes that start inside the
    ``with`` block.

    The folder is in the environment variables `METRICS_VARIABLE`, whose former value is lost, and
    `_OWN_FOLDER_VARIABLE`. At the end of the block both are removed, and the folder is deleted.

    Raises:
        InvalidArgumentError: the folder cannot be made or written to, or less than 1 MiB is free.
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
            # Later processes must not count there.
            for name in (METRICS_VARIABLE, _OWN_FOLDER_VARIABLE):
                del os.environ[name]


@contextlib.contextmanager
def lock_users_folder() -> Iterator[None]:
    """Lock the folder for metrics that the user has chosen inside the ``with`` block, because two
    servers must not count in the same folder.

    `METRICS_VARIABLE` must be set to this folder, which is created if it is missing.

    Raises:
        InvalidArgumentError: another server uses the folder, it cannot be written to, or less than
            1 MiB is free.
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
            problem = f"the folder '{folder}' is already used by another server"
            remedy = "Use a different folder, or do not set this variable"
            raise wrong(METRICS_VARIABLE, problem, remedy) from None
        require_writable(folder)
        yield
    finally:
        os.close(handle)


def own_metrics_folder() -> Path | None:
    """Return the folder that `make_metrics_folder` has made in this process or a parent, if this
    process writes its metrics there, otherwise None.
    """
    folder = os.environ.get(_OWN_FOLDER_VARIABLE)
    return Path(folder) if folder and folder == os.environ.get(METRICS_VARIABLE) else None


def end_with_parent() -> None:
    """Start a thread that kills this process as soon as its parent process has ended, and that
    first deletes the folder of `own_metrics_folder`.

    A process that is killed cannot stop its children. vLLM's engine would keep running, and with it
    the memory that a new server needs, and the files of metrics. Nothing happens in a process that
    vLLM has not started, such as a user's own, in a later call, or on systems other than Linux.
    """
    parent = multiprocessing.parent_process()
    of_vllm = multiprocessing.current_process().name.startswith(PROCESS_NAME_PREFIXES)
    if parent is not None and of_vllm and hasattr(os, "pidfd_open"):
        _watch(parent.pid)


@functools.cache  # a forked process has another parent
def _watch(process: int) -> None:
    """Start a thread that runs `_kill_after`, once for each process id."""
    threading.Thread(target=_kill_after, args=(process,), daemon=True).start()


def _kill_after(process: int) -> None:
    """Wait until another process has ended, delete this process's own folder of metrics if it has
    one, and kill this process. It does not return.

    Args:
        process: the process id of the other process. If there is no such process, it counts as
            ended.
    """
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        pass  # it ended before it could be watched
    else:
        ended = select.poll()  # not select.select, which takes no handle above 1023
        ended.register(handle, select.POLLIN)
        ended.poll()
    if folder := own_metrics_folder():
        shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)
