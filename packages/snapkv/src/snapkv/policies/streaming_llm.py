"""StreamingLLM (Xiao et al., ICLR 2024): attention sinks and a window of recent tokens."""

from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from snapkv import ops
from snapkv.errors import wrong
from snapkv.policies.base import Need
from snapkv.policies.recent import SplitBudget, split_budget
from snapkv.policies.spans import Spans
from snapkv.policies.states import DecodeStep, Eviction, LayerStates, PromptLayer, Selection
from snapkv.validation import require_choice


@dataclass(frozen=True)
class StreamingLLM(SplitBudget):
    """Keeps the first tokens and the most recent ones, for the prompt and during decoding.

    There are no scores: all heads and layers keep the same slots. A prompt is read with full
    attention and then cut. As in the paper (Sec. 3.2), tokens are numbered by their place in the
    cache, so that a text may grow beyond any length the model was trained for. Only distances
    matter to a rotary embedding, so the sinks alone are moved: their keys are rotated to the
    positions right before the recent tokens, which stay where they are; `kept_positions` still
    returns the true positions. Most reimplementations leave the sinks at their positions, which is
    ``positions="original"``.

    Args:
        budget: tokens kept, sinks included; 1024 if nothing is given.
        start: how many first tokens to keep, the sinks.
        recent: instead of `budget`, how many of the last tokens to keep, at least 1.
        positions: "cache" numbers tokens by their place in the cache; a model whose keys cannot be
            rotated is refused (a rotary embedding that depends on the text's length, latent
            attention, learned positions). "original" keeps every token's true position.

    Raises:
        InvalidTypeError: a value has the wrong type.
        InvalidArgumentError: a value is out of range, the budget is in bytes, it is not the sum of
            the other two, or it leaves no recent token.
    """

    name: ClassVar[str] = "streaming-llm"
    query_tokens: ClassVar[int] = 0

    budget: int | None = None
    _: KW_ONLY
    start: int = 4
    recent: int | None = None
    positions: Literal["cache", "original"] = "cache"

    def __post_init__(self) -> None:
        require_choice("positions", self.positions, ("cache", "original"))
        split_budget(self, "start", default_recent=lambda budget: budget - self.start)

    @property
    def needs(self) -> frozenset[Need]:
        """The name of the rotation if there are attention sinks to move, otherwise no name."""
        return frozenset({"rotation"} if self._moved_tokens else ())

    @property
    def _moved_tokens(self) -> int:
        return self.start if self.positions == "cache" else 0

    def rate(self, states: LayerStates) -> Tensor:
        """Return a score that is highest for the oldest slot, padding included.

        Returns:
            (B, 1, S) float32.
        """
        batch, slots = states.keys.shape[0], states.keys.shape[2]
        age = torch.arange(slots, 0, -1, device=states.keys.device, dtype=torch.float32)
        return age.expand(batch, 1, slots)

    def keep(self, states: LayerStates, scores: Tensor, kept: list[int]) -> Tensor:
        """Select the attention sinks and the most recent slots.

        Protected slots replace the oldest of the recent ones.

        Args:
            states: the layer.
            scores: (B, 1, S) float32, as `rate` returns them.
            kept: how many slots each row keeps.

        Returns:
            (B, H, max(kept)) int64, ascending; H is 1 unless heads protect different slots.
        """
        if states.protected is None:
            return super().keep(states, scores, kept)
        padding_slots, protected = states.leading_padding, states.protected
        return ops.keep_best(
            -scores, kept, padding_slots, first_tokens=self.start, protected=protected
        )

    def select(self, layer: PromptLayer) -> Selection:
        return replace(super().select(layer), sink_tokens=self._moved_tokens)

    def evict(self, step: DecodeStep) -> Eviction:
        eviction = super().evict(step)
        moved = 0 if eviction.keep_indices is None else self._moved_tokens
        return replace(eviction, sink_tokens=moved)

    def require_protection(self, spans: Spans) -> None:
        """Check that all protected tokens fit into the budget, with the sinks and one recent token.

        Raises:
            InvalidArgumentError: the spans have too many tokens; or the method moves its sinks,
                that is, numbers tokens by their place in the cache.
        """
        if self._moved_tokens:
            problem = f"{self!r} counts positions in the cache and cannot protect tokens"
            remedy = "Set positions='original', or set start=N to keep the first N tokens"
            raise wrong("protect", problem, remedy)
        assert self.recent is not None
        beside = f"next to its {self.start} first tokens and its newest one"
        self._require_all_spans(spans, self.recent - 1, beside)
