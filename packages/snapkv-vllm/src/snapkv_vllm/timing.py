"""How long a worker takes to compress; on an accelerator measured without waiting for it."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Times pieces of work on a device, and tells each time once it is known.

    On a CPU that is at once. On an accelerator events are laid around the work, which the host does
    not wait for, and `report` tells of those that the device has passed.

    Args:
        device: where the work runs.
        observe: is told seconds.
    """

    def __init__(self, device: torch.device, observe: Callable[[float], None]) -> None:
        self._device = device
        self._observe = observe
        self._open: deque[tuple[Any, Any]] = deque()

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Time what happens in the ``with`` block, or what it gives the device to do."""
        if self._device.type == "cpu":
            start = time.perf_counter()
            yield
            self._observe(time.perf_counter() - start)
            return
        begin, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._open.append((begin, end))

    def report(self) -> None:
        """Tell what has become known since; never waits."""
        while self._open and self._open[0][1].query():
            begin, end = self._open.popleft()
            self._observe(begin.elapsed_time(end) / 1000)
