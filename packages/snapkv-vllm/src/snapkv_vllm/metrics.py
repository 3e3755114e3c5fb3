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

from snapkv_vllm.plans import Order

_LABELS = ("model_name", "engine")
_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


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
def _series() -> dict[str, Any]:
    """The time series of this process; prometheus_client registers a name once."""
    from prometheus_client import Counter, Histogram

    compressions = "Compressions, by what was compressed: a prompt, a document or an answer."
    waits = "Requests preempted or not started because blocks for the kept tokens were missing."
    standstills = "Times that a request lacked blocks and no running request would free some."
    ratio = "Kept tokens of a request's prompt, as a fraction of it."
    seconds = "Time of all compressions of a step, on one worker."
    requests = "Requests whose prompt has ended: compressed, or whole."
    return {
        "seen": Counter("snapkv:prompt_tokens_seen", "Prompt tokens read.", _LABELS),
        "kept": Counter("snapkv:prompt_tokens_kept", "Prompt tokens kept.", _LABELS),
        "freed": Counter("snapkv:blocks_freed", "Blocks freed by compression.", _LABELS),
        "compressions": Counter("snapkv:compressions", compressions, (*_LABELS, "stage")),
        "requests": Counter("snapkv:requests", requests, (*_LABELS, "outcome")),
        "waits": Counter("snapkv:waits", waits, _LABELS),
        "standstills": Counter("snapkv:standstills", standstills, _LABELS),
        "ratio": Histogram("snapkv:request_kept_ratio", ratio, _LABELS, buckets=_RATIOS),
        "seconds": Histogram("snapkv:compression_seconds", seconds, _LABELS, buckets=_SECONDS),
    }


def _labels(vllm_config: Any) -> tuple[str, str]:
    engine = vllm_config.parallel_config.data_parallel_index
    return vllm_config.model_config.served_model_name, str(engine)


def compression_stopwatch(vllm_config: Any, device: Any) -> Stopwatch:
    """What times a worker's compressions; the first worker of an engine speaks for all."""
    from vllm.distributed import get_pp_group, get_tp_group

    if not (get_tp_group().is_first_rank and get_pp_group().is_first_rank):
        return Stopwatch(device, lambda seconds: None)
    return Stopwatch(device, _series()["seconds"].labels(*_labels(vllm_config)).observe)


class PromptMetrics:
    """Counts prompts as they end."""

    def __init__(self, vllm_config: Any) -> None:
        self._labels = _labels(vllm_config)
        self._waits, self._standstills = self._of("waits"), self._of("standstills")  # 0 at first
        self._counted: set[str] = set()

    def _of(self, series: str, *more: str) -> Any:
        return _series()[series].labels(*self._labels, *more)

    def compressed(self, order: Order, blocks_freed: int) -> None:
        """Count one compression; what a preempted request frees again counts again."""
        self._of("freed").inc(blocks_freed)
        self._of("compressions", order.choice.stage).inc()

    def waits(self) -> None:
        """Count that a request waits for want of room for what is kept, of it or an older one."""
        self._waits.inc()

    def stands_still(self) -> None:
        self._standstills.inc()

    def prompt_ended(self, request: Any, *, kept_tokens: int) -> None:
        """Count one prompt; that of a preempted request counts once."""
        if request.request_id in self._counted:
            return
        self._counted.add(request.request_id)
        seen_tokens = request.num_prompt_tokens
        self._of("seen").inc(seen_tokens)
        self._of("kept").inc(kept_tokens)
        self._of("requests", "compressed" if kept_tokens < seen_tokens else "whole").inc()
        self._of("ratio").observe(kept_tokens / seen_tokens)

    def request_ended(self, request_id: str) -> None:
        """Forget a request; another one may come under its name."""
        self._counted.discard(request_id)


@functools.cache
def _session_series() -> dict[str, Any]:
    from prometheus_client import Counter, Gauge

    now = {"labelnames": _LABELS, "multiprocess_mode": "livesum"}
    went_on = "Requests that reused the stored history of their session."
    not_read = "Tokens of histories that requests did not recompute."
    dropped = "Histories evicted, least recently used first, to free blocks."
    blocks = "Blocks that histories hold: idle ones are given to requests that wait for blocks, "
    blocks += "pinned ones stay for requests that have begun with them, or are to."
    waits = "Requests that waited for blocks while histories pinned some."
    return {
        "histories": Gauge("snapkv:session_histories", "Stored histories of sessions.", **now),
        "bytes": Gauge("snapkv:session_bytes", "Bytes of the cache that they take.", **now),
        "blocks": Gauge(
            "snapkv:session_blocks", blocks, (*_LABELS, "state"), multiprocess_mode="livesum"
        ),
        "waits": Counter("snapkv:session_waits", waits, _LABELS),
        "requests": Counter("snapkv:session_requests", went_on, _LABELS),
        "not_read": Counter("snapkv:session_tokens_not_read", not_read, _LABELS),
        "dropped": Counter("snapkv:session_histories_dropped", dropped, _LABELS),
    }


class SessionMetrics:
    """Counts histories of sessions, in the process of their engine."""

    def __init__(self, vllm_config: Any) -> None:
        labels, series = _labels(vllm_config), dict(_session_series())
        blocks = series.pop("blocks")
        self._series = {name: one.labels(*labels) for name, one in series.items()}
        self._idle, self._pinned = (blocks.labels(*labels, one) for one in ("idle", "pinned"))

    def standing(self, histories: int, held_bytes: int, *, idle: int, pinned: int) -> None:
        """Set what there is: histories, their bytes, and their blocks by state."""
        self._series["histories"].set(histories)
        self._series["bytes"].set(held_bytes)
        self._idle.set(idle)
        self._pinned.set(pinned)

    def waits(self) -> None:
        self._series["waits"].inc()

    def went_on(self, tokens_not_read: int) -> None:
        self._series["requests"].inc()
        self._series["not_read"].inc(tokens_not_read)

    def dropped(self) -> None:
        self._series["dropped"].inc()


@functools.cache
def _document_series() -> dict[str, Any]:
    from prometheus_client import Counter, Gauge

    labels = ("model_name",)
    now = {"labelnames": labels, "multiprocess_mode": "livesum"}
    requests = "Requests answered from a shared document."
    not_read = "Tokens of shared documents that requests did not recompute."
    dropped = "Shared documents removed: deleted, or least recently used when blocks were needed."
    return {
        "documents": Gauge("snapkv:documents", "Shared documents.", **now),
        "bytes": Gauge("snapkv:document_bytes", "Bytes of the cache that they take.", **now),
        "requests": Counter("snapkv:document_requests", requests, labels),
        "not_read": Counter("snapkv:document_tokens_not_read", not_read, labels),
        "dropped": Counter("snapkv:documents_dropped", dropped, (*labels, "reason")),
    }


class DocumentMetrics:
    """Counts shared documents, in the process that answers requests."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._series = _document_series()

    def standing(self, documents: int, document_bytes: int) -> None:
        self._series["documents"].labels(self._model_name).set(documents)
        self._series["bytes"].labels(self._model_name).set(document_bytes)

    def asked(self, tokens_not_read: int) -> None:
        self._series["requests"].labels(self._model_name).inc()
        self._series["not_read"].labels(self._model_name).inc(tokens_not_read)

    def dropped(self, reason: str) -> None:
        self._series["dropped"].labels(self._model_name, reason).inc()
