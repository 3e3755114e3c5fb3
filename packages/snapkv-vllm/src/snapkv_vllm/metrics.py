"""Metrics of compression in vLLM's Prometheus endpoint.

The scheduler counts in the process of the engine, and a worker in its own. The multi-process mode
of prometheus_client, which `snapkv serve` switches on, sums the counts in the process that answers
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
    "requests": "Requests whose prompt has ended, by outcome: compressed or whole.",
    "waits": "Requests preempted or not started because blocks for the kept tokens were missing.",
    "standstills": "Times that a request lacked blocks and no running request would free any.",
    "refusals": "Requests that the plugin refused, by the status of the answer and the field or "
    "setting that was wrong.",
    "session_waits": "Requests that waited for blocks while histories pinned some.",
    "session_requests": "Requests that reused the stored history of their session.",
    "session_tokens_not_read": "Tokens of histories that requests did not recompute.",
    "session_histories_dropped": "Histories evicted, least recently used first, to free blocks.",
}
_GAUGES = {
    "session_histories": "Stored histories of sessions.",
    "session_bytes": "Bytes of the cache that stored histories take.",
    "session_blocks": "Blocks of stored histories: idle blocks are freed for requests that wait, "
    "pinned blocks are in use by requests that begin with them.",
}
_HISTOGRAMS = {
    "request_kept_ratio": ("Kept tokens of a request's prompt, as a fraction of it.", _RATIOS),
    "compression_seconds": ("Time of all compressions of a step, on one worker.", _SECONDS),
}


class Stopwatch:
    """Measures how long some work takes on a device, and reports each time as soon as it is known.

    On a CPU that is at once. On an accelerator, events are recorded before and after the work, and
    the host does not wait for them; `report` reports the times of events that the device has
    passed.

    Args:
        device: the device that does the work.
        observe: called with each time in seconds.
    """

    def __init__(self, device: torch.device, observe: Callable[[float], None]) -> None:
        self._device = device
        self._observe = observe
        self._open: deque[tuple[Any, Any]] = deque()

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Measure the time of the ``with`` block in seconds, including the work that it launches on
        the device.

        On a CPU the time is reported at the end of the block, otherwise by a later call of
        `report`. If the block raises, nothing is reported.
        """
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
        """Report the times that have become known since the last call, in the order of the work,
        without waiting for the device.
        """
        while self._open and self._open[0][1].query():
            begin, end = self._open.popleft()
            self._observe(begin.elapsed_time(end) / 1000)


@functools.cache
def _make_metric(name: str, labels: tuple[str, ...]) -> Any:
    """Build the metric `name`, whose full name begins with ``snapkv:``, or return it if it exists,
    because prometheus_client registers a name only once.

    Raises:
        KeyError: there is no metric with this name.
        ValueError: the metric exists with other names of labels.
    """
    from prometheus_client import Counter, Gauge, Histogram

    full = f"snapkv:{name}"
    if name in _COUNTERS:
        return Counter(full, _COUNTERS[name], labels)
    if name in _GAUGES:
        return Gauge(full, _GAUGES[name], labels, multiprocess_mode="livesum")
    text, buckets = _HISTOGRAMS[name]
    return Histogram(full, text, labels, buckets=buckets)


def labels_of(vllm_config: Any) -> dict[str, str]:
    """Return the labels of an engine's metrics: "model_name", the name of its model in requests,
    and "engine", the number of the engine among the data-parallel ones.
    """
    engine = vllm_config.parallel_config.data_parallel_index
    return {"model_name": vllm_config.model_config.served_model_name, "engine": str(engine)}


class Metrics:
    """The metrics of one engine or one model in this process. The names of metrics are given
    without ``snapkv:``.

    Args:
        labels: labels that all metrics of this object have.
    """

    def __init__(self, **labels: str) -> None:
        self._labels = labels

    def get(self, name: str, **labels: str) -> Any:
        """Return the metric `name` with the labels of this object and the given labels, as an
        object of prometheus_client.

        Raises:
            KeyError: there is no metric with this name.
        """
        labels = self._labels | labels
        return _make_metric(name, tuple(labels)).labels(**labels)

    def count(self, name: str, by: int = 1, **labels: str) -> None:
        """Increase the value of a counter by the number `by`. With 0 the counter is only created,
        so that it is shown from the start.

        Args:
            name: the name of the counter.
            by: the number to add.
            labels: labels of this counter, besides those of this object.

        Raises:
            KeyError: there is no metric with this name.
        """
        self.get(name, **labels).inc(by)

    def set(self, name: str, value: int, **labels: str) -> None:
        """Set the value of a gauge to a number.

        Args:
            name: the name of the gauge.
            value: its new value.
            labels: labels of this gauge, besides those of this object.

        Raises:
            KeyError: there is no metric with this name.
        """
        self.get(name, **labels).set(value)


def compression_stopwatch(vllm_config: Any, device: Any) -> Stopwatch:
    """Return a stopwatch for the compressions of a worker, which adds each time to the histogram
    "compression_seconds". Only the first worker of an engine does this; the stopwatches of the
    others discard their times.
    """
    from vllm.distributed import get_pp_group, get_tp_group

    if not (get_tp_group().is_first_rank and get_pp_group().is_first_rank):
        return Stopwatch(device, lambda seconds: None)
    seconds = Metrics(**labels_of(vllm_config)).get("compression_seconds")
    return Stopwatch(device, seconds.observe)


class PromptMetrics(Metrics):
    """The metrics of prompts. A prompt is counted when all of its tokens have been read."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(**labels_of(vllm_config))
        self._counted: set[str] = set()
        for name in ("waits", "standstills"):
            self.count(name, 0)
        self.record_refusal("prompt", by=0)

    def record_refusal(self, reason: str, by: int = 1) -> None:
        """Count a request that is refused only by the engine. vLLM's server answers such a request
        with status 500.

        Args:
            reason: the field or setting that was wrong, as `reason_of` returns it.
            by: how many requests; with 0 the counter is only created.
        """
        self.count("refusals", by, status="500", reason=reason)

    def record_compression(self, order: Order, blocks_freed: int) -> None:
        """Count one compression, and the blocks that it has freed in all KV cache groups.

        If a request is preempted and compressed again, both are counted again.
        """
        self.count("blocks_freed", blocks_freed)
        self.count("compressions", stage=order.selector.stage)

    def record_prompt_end(self, request: Any, *, kept_tokens: int) -> None:
        """Count the prompt of a request when it has been read. If the request is preempted and
        starts again, it is counted only once, until `forget_request` is called.

        Args:
            request: vLLM's request.
            kept_tokens: how many tokens of the prompt each KV head keeps on average; fewer than the
                prompt has if it was compressed.
        """
        if request.request_id in self._counted:
            return
        self._counted.add(request.request_id)
        seen_tokens = request.num_prompt_tokens
        self.count("prompt_tokens_seen", seen_tokens)
        self.count("prompt_tokens_kept", kept_tokens)
        self.count("requests", outcome="compressed" if kept_tokens < seen_tokens else "whole")
        self.get("request_kept_ratio").observe(kept_tokens / seen_tokens)

    def forget_request(self, request_id: str) -> None:
        """Forget that the prompt of a request was counted, because a later request may have the
        same id. A request that was not counted is ignored.
        """
        self._counted.discard(request_id)
