"""The bytes that a cache holds, and the peak memory of a piece of work."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from snapkv.cache.layer import CompressedLayer

FREED_MEMORY_HANDED_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Environment variables that make the allocator return freed memory, so that resident memory counts
live tensors.
"""


def cache_bytes(cache: Cache) -> int:
    """Return the total number of bytes that are held by the layers of a cache.

    The whole storage behind a tensor is counted, even if the tensor is a view of a part, and shared
    storage is counted once.
    """
    sizes: dict[int, int] = {}
    for layer in cache.layers:
        ours = isinstance(layer, CompressedLayer)
        own = vars(layer)
        names = ("store", "slots", "state", "queries") if ours else own
        for tensor in _tensors([own[name] for name in names]):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield all plain tensors that are contained in a value.

    The value is a tensor, a list, a tuple or an object of snapkv. A quantized tensor gives the
    tensors that it consists of.
    """
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from _tensors(getattr(value, name))
        elif value.numel():
            yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif type(value).__module__.startswith("snapkv."):
        yield from _tensors(list(vars(value).values()))


def peak_growth_bytes(work: Callable[[], Any], device: torch.device) -> int:
    """Run a function and return by how many bytes the memory grows while it runs, at its peak.

    On CUDA the allocator's tensors are counted. Elsewhere the memory of the whole process is
    counted, which needs Linux. There the work should run in a process of its own whose allocator
    returns freed memory (``MALLOC_MMAP_THRESHOLD_=65536``).

    Args:
        work: the function, whose result is ignored. What it raises passes through.
        device: where its tensors are.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    work()
    return resident_bytes("VmHWM") - before


def resident_bytes(field: str) -> int:
    """Return a memory field of this process from ``/proc/self/status``, such as "VmRSS", in bytes.
    This works only on Linux.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))
