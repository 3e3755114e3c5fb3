"""StreamingLLM (Xiao et al., ICLR 2024): attention sinks and a window of recent tokens."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from snapkv.policies.base import (
    DecodeStep,
    EvictingPolicy,
    Eviction,
    PromptLayer,
    Selection,
    keep_best_and_recent,
)
from snapkv.policies.split import split_budget


@dataclass(frozen=True)
class StreamingLLM(EvictingPolicy):
    """Keeps the first tokens and the most recent ones, at the prompt's end and ever after.

    No scores: the same slots in all heads and layers. A prompt is read with full attention and
    then cut. Positions stay the true ones (``positions="original"`` of the literature).

    Args:
        budget: tokens kept, sinks included; 1024 if nothing is given.
        start: how many first tokens to keep, the sinks.
        recent: instead of `budget`, how many of the last tokens to keep, at least 1.

    Raises:
        InvalidArgumentError: a budget that leaves no recent token.
    """

    name: ClassVar[str] = "streaming-llm"

    budget: int | None = None
    _: KW_ONLY
    start: int = 4
    recent: int | None = None

    def __post_init__(self) -> None:
        """Complete and check the three sizes."""
        split_budget(self, "start", "recent", default_second=lambda budget: budget - self.start)

    @property
    def query_tokens(self) -> int:
        """None: nothing is scored."""
        return 0

    @property
    def room_tokens(self) -> int:
        """The budget."""
        assert self.budget is not None
        return self.budget

    def select(self, layer: PromptLayer) -> Selection:
        """Keep the sinks and the last tokens."""
        return Selection.of(layer, self._keep(layer, layer.pad_tokens))

    def evict(self, step: DecodeStep) -> Eviction:
        """Drop the oldest tokens behind the sinks."""
        if step.keys.shape[2] <= self.start + (self.recent or 0):
            return Eviction()
        return Eviction(keep_indices=self._keep(step, step.filler_tokens))

    def _keep(self, states: PromptLayer | DecodeStep, filler_tokens: Tensor | None) -> Tensor:
        batch, slots = states.keys.shape[0], states.keys.shape[2]
        age = torch.arange(slots, 0, -1, device=states.keys.device, dtype=torch.float32)
        oldest_first = age.expand(batch, 1, slots)
        assert self.recent is not None
        return keep_best_and_recent(oldest_first, self.start, self.recent, filler_tokens)
