"""SnapKV (Li et al., NeurIPS 2024): an observation window votes on the prompt before it."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from snapkv import ops
from snapkv.policies.prefix_policy import PrefixPolicy
from snapkv.policies.states import PromptLayer, VotesAtStake
from snapkv.validation import (
    DEFAULT_DECAY,
    DEFAULT_KERNEL,
    FADING_SINKS,
    GROUP_REDUCTIONS,
    require_choice,
    require_pooling,
)


@dataclass(frozen=True)
class SnapKV(PrefixPolicy):
    """The last queries of the prompt vote; each head keeps the best-voted clusters.

    The attention of the last `window_size` queries onto the prefix is summed (Eq. 2), combined
    over the query heads that share a KV head, pooled so that neighbours of a strong position
    survive with it (Sec. 4.3), and the best positions are kept beside the window (Listing 1).
    The paper's settings: LongBench window 32, kernel 7, max; needle tests window 16, kernel 5.

    Args:
        budget: tokens kept per KV head and layer, window included; 1024 if neither is given.
            "auto" lets the votes choose for every layer, see `AutoBudget`.
        keep_ratio: instead of `budget`, the fraction of the prefix to keep beside the window.
        window_size: the last tokens of the prompt; they vote and are always kept.
        kernel_size: width of "max" and "avg" pooling, odd and centred, 7 by default; 1 switches
            pooling off. Or a pair ``(before, behind)``: how far a vote reaches to either side.
        pooling: "max" or "avg" over neighbours, as in the paper; or "fading", where a vote lifts
            what stands behind it, by a factor less for every token: what is copied next stands
            behind the place that is voted for.
        decay: that factor of "fading", in (0, 1), 0.935 by default.
        sink_tokens: first tokens that each head keeps, and whose votes lift no neighbours:
            attention sinks get most of the votes, and nothing is copied from behind them. 4 with
            "fading", else 0, as in the paper.
        group_reduce: how the query heads of a KV head are combined: "mean", "max", "sum"; "none"
            lets every query head keep its own set, as the paper does, at the price of storing
            keys and values once per query head.
    """

    name: ClassVar[str] = "snapkv"
    rates_what_is_held: ClassVar[bool] = True
    scores_are_votes: ClassVar[bool] = True
    compares_layers: ClassVar[bool] = True

    _: KW_ONLY
    kernel_size: int | tuple[int, int] | None = None
    pooling: Literal["max", "avg", "fading"] = "max"
    decay: float | None = None
    sink_tokens: int | None = None  # type: ignore[assignment] # a number from __post_init__ on
    group_reduce: Literal["mean", "max", "sum", "none"] = "mean"

    def __post_init__(self) -> None:
        require_pooling(self.pooling, self.kernel_size, self.decay)
        if self.sink_tokens is None:
            sinks = FADING_SINKS if self.pooling == "fading" else 0
            object.__setattr__(self, "sink_tokens", sinks)
        super().__post_init__()
        if self.pooling == "fading":
            object.__setattr__(self, "decay", self.decay or DEFAULT_DECAY)
        elif isinstance(self.kernel_size, list):  # as a file has it
            object.__setattr__(self, "kernel_size", tuple(self.kernel_size))
        elif self.kernel_size is None:
            object.__setattr__(self, "kernel_size", DEFAULT_KERNEL)
        require_choice("group_reduce", self.group_reduce, GROUP_REDUCTIONS)

    @property
    def query_tokens(self) -> int:
        return self.window_size

    @property
    def per_query_head(self) -> bool:
        return self.group_reduce == "none"

    def score(self, layer: PromptLayer) -> Tensor:
        """Pooled votes of the window: (B, Hkv, P) float32, Hq instead of Hkv for "none"."""
        pooling = self.pooling, self.kernel_size, self.decay, self.sink_tokens
        own = ("score", self.window_size, self.group_reduce, *pooling)
        return layer.once(own, lambda: self.pool(self.votes(layer), layer))

    def pool(self, votes: Tensor, layer: PromptLayer) -> Tensor:
        """What the layer's votes become before the best are chosen, the same shape."""
        if not self.sink_tokens:
            return self._pooled(votes)
        sinks = layer.is_among_first(self.sink_tokens, votes.shape[-1])
        return torch.where(sinks, votes, self._pooled(votes.masked_fill(sinks, 0.0)))

    def _pooled(self, votes: Tensor) -> Tensor:
        if self.pooling == "fading":
            assert self.decay is not None
            return ops.fade_votes(votes, self.decay)
        assert self.kernel_size is not None
        return ops.pool_votes(votes, self.kernel_size, self.pooling)

    def votes(self, layer: PromptLayer) -> Tensor:
        """Votes of the window before pooling, shape as of `score`."""
        return layer.once(("votes", self.window_size, self.group_reduce), lambda: self._vote(layer))

    def _vote(self, layer: PromptLayer) -> Tensor:
        own_keys = layer.stored_heads is None  # or heads of several keys share what is stored
        votes = ops.window_votes(
            layer.queries,
            layer.keys,
            pad_tokens=layer.pad_tokens,
            group_reduce=self.group_reduce if own_keys else "none",
            score_options=layer.score_options,
            impl=layer.votes_impl,
        )
        if not own_keys:
            votes = ops.reduce_group(votes, layer.num_kv_heads, self.group_reduce)
        prefix_tokens = layer.keys.shape[2] - self.window_size  # fewer queries may have voted
        return votes[..., :prefix_tokens]

    @torch.no_grad()
    def votes_at_stake(self, layer: PromptLayer) -> VotesAtStake:
        """The votes, and as shares of the window's attention, lifted by those before them."""
        votes = self.votes(layer)
        first = layer.is_among_first(FADING_SINKS, votes.shape[-1])
        lifted = ops.fade_votes(votes.masked_fill(first, 0.0), DEFAULT_DECAY)
        return votes, lifted / self.summed_weights(layer)

    def summed_weights(self, layer: PromptLayer) -> int:
        """One of every query that votes; of every head of a group too where these are summed."""
        heads, queries = layer.queries.shape[1:3]
        return queries * (heads // layer.num_kv_heads if self.group_reduce == "sum" else 1)
