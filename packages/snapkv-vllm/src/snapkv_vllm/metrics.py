"""What compression does, in vLLM's Prometheus endpoint.

The scheduler counts in the engine's process and a worker in its own; prometheus_client's
multi-process mode, which `snapkv serve` switches on, carries the counts to the process that answers
``/metrics``.
"""

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from snapkv_vllm.admission.plans import Order

_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

_COUNTERS = {
    "prompt_tokens_seen": "Prompt tokens read.",
    "prompt_tokens_kept": "Prompt tokens kept.",
    "blocks_freed": "Blocks freed by compression.",
    "compressions": "Compressions, by what was compressed: a prompt or an answer.",
    "requests": "Requests whose prompt has ended: compressed, or whole.",
    "waits": "Requests preempted or not started because blocks for the kept tokens were missing.",
    "standstills": "Times that a request lacked blocks and no running request would free some.",
    "refusals": "Requests that the plugin refused, by the status of the answer and by the field or "
    "setting that was wrong.",
    "session_waits": "Requests that waited for blocks while histories pinned some.",
    "session_requests": "Requests that reused the stored history of their session.",
    "session_tokens_not_read": "Tokens of histories that requests did not recompute.",
    "session_histories_dropped": "Histories evicted, least recently used first, to free blocks.",
}
_GAUGES = {
    "session_histories": "Stored histories of sessions.",
    "session_bytes": "Bytes of the cache that they take.",
    "session_blocks": "Blocks that histories hold: idle ones are given to requests that wait for "
    "blocks, pinned ones stay for requests that have begun with them, or are to.",
}
_HISTOGRAMS = {
    "request_kept_ratio": ("Kept tokens of a request's prompt, as a fraction of it.", _RATIOS),
    "compression_seconds": ("Time of all compressions of a step, on one worker.", _SECONDS),
}


class Stopwatch:
    """Times pieces of work on a device, and tells each time once it is known.

    On a CPU that is at once. On an accelerator events are laid around the work, which the host does
    not wait for, and `report` tells of those that the device has passed.
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


@functools.cache
def _make_metric(name: str, labels: tuple[str, ...]) -> Any:
    """prometheus_client registers a name once."""
    from prometheus_client import Counter, Gauge, Histogram

    full = f"snapkv:{name}"
    if name in _COUNTERS:
        return Counter(full, _COUNTERS[name], labels)
    if name in _GAUGES:
        return Gauge(full, _GAUGES[name], labels, multiprocess_mode="livesum")
    said, buckets = _HISTOGRAMS[name]
    return Histogram(full, said, labels, buckets=buckets)


def labels_of(vllm_config: Any) -> dict[str, str]:
    """Of what an engine counts."""
    engine = vllm_config.parallel_config.data_parallel_index
    return {"model_name": vllm_config.model_config.served_model_name, "engine": str(engine)}


class Metrics:
    """Counts in this process, for one engine or one model; names are without ``snapkv:``."""

    def __init__(self, **labels: str) -> None:
        self._labels = labels

    def get(self, name: str, **labels: str) -> Any:
        labels = self._labels | labels
        return _make_metric(name, tuple(labels)).labels(**labels)

    def count(self, name: str, by: int = 1, **labels: str) -> None:
        self.get(name, **labels).inc(by)

    def set(self, name: str, value: int, **labels: str) -> None:
        self.get(name, **labels).set(value)


def compression_stopwatch(vllm_config: Any, device: Any) -> Stopwatch:
    """What times a worker's compressions; the first worker of an engine speaks for all."""
    from vllm.distributed import get_pp_group, get_tp_group

    if not (get_tp_group().is_first_rank and get_pp_group().is_first_rank):
        return Stopwatch(device, lambda seconds: None)
    seconds = Metrics(**labels_of(vllm_config)).get("compression_seconds")
    return Stopwatch(device, seconds.observe)


class PromptMetrics(Metrics):
    """Counts prompts as they end."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(**labels_of(vllm_config))
        self._counted: set[str] = set()
        for name in ("waits", "standstills"):
            self.count(name, 0)
        self.record_refusal("prompt", by=0)

    def record_refusal(self, reason: str, by: int = 1) -> None:
        """Count a request that only the engine refuses, which vLLM's server answers with a 500."""
        self.count("refusals", by, status="500", reason=reason)

    def record_compression(self, order: Order, blocks_freed: int) -> None:
        """Count one compression; what a preempted request frees again counts again."""
        self.count("blocks_freed", blocks_freed)
        self.count("compressions", stage=order.selector.stage)

    def record_prompt_end(self, request: Any, *, kept_tokens: int) -> None:
        """Count one prompt; that of a preempted request counts once."""
        if request.request_id in self._counted:
            return
        self._counted.add(request.request_id)
        seen_tokens = request.num_prompt_tokens
        self.count("prompt_tokens_seen", seen_tokens)
        self.count("prompt_tokens_kept", kept_tokens)
        self.count("requests", outcome="compressed" if kept_tokens < seen_tokens else "whole")
        self.get("request_kept_ratio").observe(kept_tokens / seen_tokens)

    def forget_request(self, request_id: str) -> None:
        """Forget a request; another one may come under its name."""
        self._counted.discard(request_id)
