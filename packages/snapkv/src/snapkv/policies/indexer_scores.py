"""Indexed attention's own scores choose: what a query would not attend to anyway is dropped.

DeepSeek Sparse Attention (DeepSeek-V3.2): the score of a token is the sum over the indexer's heads
of weight times relu(query · key). A query attends to the `index_topk` best; all others are stored
for later queries, and are what these methods drop.
"""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from snapkv.errors import UnsupportedModelError
from snapkv.policies.base import Need, PrefixPolicy
from snapkv.policies.budget import require_tokens
from snapkv.policies.recent import BestAndRecent
from snapkv.policies.spans import Spans
from snapkv.policies.states import LayerStates, PromptLayer
from snapkv.validation import DEFAULT_BUDGET, DEFAULT_WINDOW, require_int


@dataclass(frozen=True)
class IndexerScores(PrefixPolicy):
    """Keeps the positions that the indexer rates highest for the queries of the window.

    Only for models of indexed attention (DeepSeek-V3.2, GLM-MoE-DSA). The score of a position is
    the mean of the indexer's own scores over the window's queries; of a later turn that is shorter
    than the window, over its own queries. Layers that go by an earlier layer's indexer keep what
    that one keeps.

    Args:
        budget, keep_ratio, window_size: as in `PrefixPolicy`.
    """

    name: ClassVar[str] = "indexer"
    needs: ClassVar[frozenset[Need]] = frozenset({"index_scores"})

    @property
    def query_tokens(self) -> int:
        """The window."""
        return self.window_size

    def score(self, layer: PromptLayer) -> Tensor:
        """The mean score over the window's queries: (B, 1, P) float32."""
        scores = _mean_scores(layer, self.window_size)
        return scores[..., : layer.keys.shape[2] - self.window_size]


@dataclass(frozen=True)
class IndexerEviction(BestAndRecent):
    """Also evicts while generating, by the indexer's scores for the newest queries.

    At the end of the prompt as `IndexerScores`, with `recent_tokens` as its window; behind every
    step what the indexer rates lowest for the queries of that step goes, but for the recent tokens.

    Args:
        budget: tokens kept per layer.
        recent_tokens: the last tokens, which always stay, fewer than the budget.
    """

    name: ClassVar[str] = "indexer-eviction"
    needs: ClassVar[frozenset[Need]] = frozenset({"index_scores"})

    budget: int = DEFAULT_BUDGET
    _: KW_ONLY
    recent_tokens: int = DEFAULT_WINDOW

    def __post_init__(self) -> None:
        require_tokens(self)
        require_int("budget", self.budget, minimum=2)
        require_int("recent_tokens", self.recent_tokens, minimum=1, maximum=self.budget - 1)

    @property
    def query_tokens(self) -> int:
        """The recent tokens."""
        return self.recent_tokens

    @property
    def max_decode_tokens(self) -> int:
        return self.budget

    def rate(self, states: LayerStates) -> Tensor:
        """The mean score over the last queries: (B, 1, S) float32."""
        return _mean_scores(states, self.recent_tokens)

    def require_protection(self, spans: Spans) -> None:
        """Raise unless they leave room for the recent tokens."""
        room = self.budget - self.recent_tokens
        self._require_whole_spans(spans, room, f"beside its {self.recent_tokens} recent tokens")


def _mean_scores(states: LayerStates, window: int) -> Tensor:
    """(B, 1, S) float32: over the last queries that are no pads, of what all of them see."""
    if states.index_scores is None:
        raise UnsupportedModelError(
            "policy: expected a model of indexed attention, such as DeepSeek-V3.2, for a method "
            "that goes by the indexer's scores, got one without an indexer; use SnapKV"
        )
    scores = states.index_scores[:, -window:]
    rows, slots = scores.shape[1:]
    pads = states.leading_fillers
    queries = torch.arange(slots - rows, slots, device=scores.device)
    real = queries >= (0 if pads is None else pads[:, None])
    real = real.expand(len(scores), -1)[..., None] & scores.isfinite()
    total = scores.masked_fill(~real, 0.0).sum(dim=1, keepdim=True)
    return total / real.sum(dim=1, keepdim=True).clamp(min=1)
