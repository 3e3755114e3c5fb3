"""What compression does, in vLLM's Prometheus endpoint.

The scheduler counts in the engine's process; prometheus_client's multi-process mode, which
`snapkv serve` switches on, carries the counts to the process that answers ``/metrics``.
"""

import functools
from typing import Any

from prometheus_client import Counter, Histogram

_LABELS = ("model_name", "engine")
_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@functools.cache
def _series() -> dict[str, Any]:
    """The time series of this process; prometheus_client registers a name once."""
    return {
        "seen": Counter("snapkv:prompt_tokens_seen", "Prompt tokens read to the end.", _LABELS),
        "kept": Counter("snapkv:prompt_tokens_kept", "Prompt tokens that stayed.", _LABELS),
        "freed": Counter("snapkv:blocks_freed", "Blocks freed by compression.", _LABELS),
        "requests": Counter(
            "snapkv:requests",
            "Requests whose prompt has ended: compressed, whole, or whole for want of room.",
            (*_LABELS, "outcome"),
        ),
        "ratio": Histogram(
            "snapkv:request_kept_ratio",
            "Kept tokens of a request's prompt, as a fraction of it.",
            _LABELS,
            buckets=_RATIOS,
        ),
    }


class PromptMetrics:
    """Counts prompts as they end.

    Args:
        vllm_config: names the model and the engine in the labels.
    """

    def __init__(self, vllm_config: Any) -> None:
        engine = vllm_config.parallel_config.data_parallel_index
        self._labels = (vllm_config.model_config.served_model_name, str(engine))
        self._series = _series()

    def prompt_ended(
        self, request: Any, *, kept_tokens: int, blocks_freed: int = 0, no_room: bool = False
    ) -> None:
        """Count one prompt; what a preempted request frees again counts, its prompt does not."""
        self._series["freed"].labels(*self._labels).inc(blocks_freed)
        if request.num_preemptions:
            return
        seen_tokens = request.num_prompt_tokens
        outcome = "compressed" if kept_tokens < seen_tokens else "whole"
        self._series["seen"].labels(*self._labels).inc(seen_tokens)
        self._series["kept"].labels(*self._labels).inc(kept_tokens)
        self._series["requests"].labels(*self._labels, "no-room" if no_room else outcome).inc()
        self._series["ratio"].labels(*self._labels).observe(kept_tokens / seen_tokens)
