"""The free memory of a device, and one error class for all kinds of out-of-memory errors."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from snapkv.errors import OutOfMemoryError, SnapKVError


def free_bytes(device: torch.device) -> int | None:
    """Return how many bytes of a device's memory are free, or None if this is not known.

    On the CPU, the limit of the process (``ulimit -v``) is taken into account, too.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    known = [count for count in (_pages("AVPHYS"), _free_address_bytes()) if count is not None]
    return min(known, default=None)


def total_bytes(device: torch.device) -> int | None:
    """Return the size of a device's memory in bytes, or None if it is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return _pages("PHYS") if device.type == "cpu" else None


def _pages(kind: str) -> int | None:
    """Return the size of all memory pages of one kind, such as "AVPHYS", in bytes, if it is known.

    Returns:
        The number of bytes, or None.
    """
    name = f"SC_{kind}_PAGES"
    known = name in os.sysconf_names
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") if known else None


def _free_address_bytes() -> int | None:
    """Return how many bytes this process may still allocate (``ulimit -v``); None for no limit."""
    try:
        import resource  # not on Windows

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return None
    if limit == resource.RLIM_INFINITY:
        return None
    return max(0, limit - pages * resource.getpagesize())


@contextlib.contextmanager
def out_of_memory_explained(explain: Callable[[], str]) -> Iterator[None]:
    """Turn every kind of out-of-memory error in this block into an `OutOfMemoryError`.

    Args:
        explain: returns the message; it is called only after an error.

    Raises:
        OutOfMemoryError: the block has run out of memory, on the host or on a device.
    """
    try:
        yield
    except SnapKVError:
        raise
    except (MemoryError, OSError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise OutOfMemoryError(explain()) from error


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return "DefaultCPUAllocator" in str(error)
