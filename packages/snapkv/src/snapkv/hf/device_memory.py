"""Free memory of a device, and one error for all kinds of out-of-memory errors."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from snapkv.errors import OutOfMemoryError, SnapKVError


def free_bytes(device: torch.device) -> int | None:
    """Free bytes on a device, on the CPU within ``ulimit -v``; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    known = [count for count in (_pages("AVPHYS"), _free_address_bytes()) if count is not None]
    return min(known, default=None)


def total_bytes(device: torch.device) -> int | None:
    """Total bytes of a device's memory; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return _pages("PHYS") if device.type == "cpu" else None


def _pages(kind: str) -> int | None:
    """Bytes of the system's pages of a kind; None if unknown."""
    name = f"SC_{kind}_PAGES"
    known = name in os.sysconf_names
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") if known else None


def _free_address_bytes() -> int | None:
    """Bytes left within the limit of this process's address space; None without a limit."""
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
    """Turn every kind of out-of-memory error into an `OutOfMemoryError` with this message."""
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
