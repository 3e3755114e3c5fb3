"""What is free on a device, and one error for all the ways in which it runs out."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from snapkv.errors import OutOfMemoryError, SnapKVError


def free_bytes(device: torch.device) -> int | None:
    """Bytes that are free on a device; None where the system does not say.

    On the CPU no more than what a limit on the address space (``ulimit -v``) leaves.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    known = [count for count in (_free_memory_bytes(), _free_address_bytes()) if count is not None]
    return min(known, default=None)


def total_bytes(device: torch.device) -> int | None:
    """Bytes of a device's memory, free or not; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    if device.type != "cpu" or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_memory_bytes() -> int | None:
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_address_bytes() -> int | None:
    """What a limit on this process's address space leaves; None without one."""
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
    """Turn the ways in which torch and the system run out of memory into one error.

    Raises:
        OutOfMemoryError: with the message that `explain` gives.
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
