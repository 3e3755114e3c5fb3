"""Bytes: of a cache, and the most that a piece of work holds at once."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from snapkv.cache.layer import CompressedLayer

FREED_MEMORY_HANDED_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Environment in which resident memory counts live tensors and not the allocator's reserves."""


def cache_bytes(cache: Cache) -> int:
    """Bytes of all storage that a cache's layers hold; what several tensors share counts once."""
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
    """Plain tensors in a tensor, list, tuple or object of ours; a quantised tensor's parts."""
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
    """The most bytes that some work holds at once, beyond what was held before it.

    On CUDA of the allocator's tensors; on Linux of the whole process, whose allocator should be
    told to hand freed memory back (``MALLOC_MMAP_THRESHOLD_=65536``), in a process of its own.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # start the peak again from here
    work()
    return resident_bytes("VmHWM") - before


def resident_bytes(field: str) -> int:
    """A field of ``/proc/self/status``, which counts KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))
