"""H2O (Zhang et al., NeurIPS 2023): heavy hitters of accumulated attention, and recent tokens."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from torch import Tensor

from snapkv import ops
from snapkv.policies.base import ALL_QUERIES
from snapkv.policies.recent import SplitBudget, split_budget
from snapkv.policies.spans import Spans
from snapkv.policies.states import DecodeStep, Eviction, LayerStates, PromptLayer, Selection


@dataclass(frozen=True)
class H2O(SplitBudget):
    """Keeps the tokens that have received the most attention so far, and the most recent ones.

    A token's score is the attention it has received from every query since the start of the prompt,
    summed in float32 and averaged over the query heads that share a KV head (the paper has no such
    groups). At the end of the prompt and after every generated token, each head keeps its `heavy`
    best-scored tokens among the older ones and the `recent` last ones; dropped tokens never return.
    There are four public variants. This is the one that really drops tokens
    (``H2OKVCache_LayerWise``), with the paper's accumulated scores: a new token attends to ``heavy
    + recent + 1`` tokens, itself included. The paper splits a budget evenly.

    Args:
        budget: tokens kept per KV head and layer, half heavy and half recent; 1024 if nothing is
            given.
        heavy: instead of `budget`, how many heavy hitters to keep; 0 leaves a sliding window.
        recent: how many of the last tokens to keep, at least 1.

    Raises:
        InvalidTypeError: a value has the wrong type.
        InvalidArgumentError: a value is out of range, or `budget` is not the sum of the other two.
    """

    name: ClassVar[str] = "h2o"
    query_tokens: ClassVar[int] = ALL_QUERIES

    budget: int | None = None
    _: KW_ONLY
    heavy: int | None = None
    recent: int | None = None

    def __post_init__(self) -> None:
        split_budget(self, "heavy", default_recent=lambda budget: (budget + 1) // 2)

    def rate(self, states: LayerStates) -> Tensor:
        """Compute the attention that each slot receives from the queries.

        Returns:
            (B, Hkv, S) float32.
        """
        received = ops.attention_received(states.without_empty_slots)
        return ops.reduce_group(received, states.num_kv_heads, "mean")

    def note(self, layer: PromptLayer) -> Tensor:
        return self.rate(layer)

    def select(self, layer: PromptLayer) -> Selection:
        """Select the tokens of the prompt with the most attention, and the most recent ones."""
        scores = self.rate(layer)
        return Selection.of(layer, self._heaviest(layer, scores), scores=scores)

    def evict(self, step: DecodeStep) -> Eviction:
        """Add the attention of this step to the scores, and drop the lowest-scored tokens."""
        assert step.scores is not None
        scores = step.scores + self.rate(step)
        return Eviction(keep_indices=self._heaviest(step, scores), scores=scores)

    def _heaviest(self, states: LayerStates, scores: Tensor) -> Tensor:
        kept = [self.of_prompt(tokens, states) for tokens in states.row_lengths]
        return self.keep(states, scores, kept)

    def require_protection(self, spans: Spans) -> None:
        """Check that the protected tokens fit into the budget for heavy hitters.

        Raises:
            InvalidArgumentError: the spans have more tokens than there are heavy hitters.
        """
        assert self.heavy is not None
        self._require_all_spans(spans, self.heavy, f"next to its {self.recent} recent tokens")
