"""SnapKV (Li et al., NeurIPS 2024): an observation window votes on the prompt before it."""

import functools
from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from snapkv import ops
from snapkv.policies.prefix import Prefix
from snapkv.policies.prefix_policy import PrefixPolicy, of_any_layer
from snapkv.policies.states import PromptLayer, VotesAtStake
from snapkv.validation import (
    DEFAULT_DECAY,
    DEFAULT_KERNEL,
    FADING_SINKS,
    GROUP_REDUCTIONS,
    WINDOW_REDUCTIONS,
    require_choice,
    require_int,
    require_pooling,
)

_ORDER_BELOW_THE_MEAN = 2.0**-10
"""By how much a vote below its head's mean still counts, so that the better one stays."""

_ON_VOTERS = 0.25
"""What a largest vote on a voter counts: voters look at themselves and their neighbours most."""


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
        window_reduce: how the queries of the window are combined: "mean", as in the paper, which
            adds their weights up and then pools; "max" pools the weights of each query, scaled
            back to their own sum, and takes the largest, so that what one query needs counts
            whatever the others look at (DefensiveKV, Feng et al., ICLR 2026). Where heads or layers
            share a budget, a head's scores are then at least its mean, within a thousandth.
        voters: how many of the last tokens vote, where not `window_size`: fewer, or more than are
            kept for being last. Votes on a voter are those of the ones after it, and with "max" as
            `window_reduce` count a quarter.
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
    window_reduce: Literal["mean", "max"] = "mean"
    voters: int | None = None

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
        require_choice("window_reduce", self.window_reduce, WINDOW_REDUCTIONS)
        if self.voters is not None:
            require_int("voters", self.voters, minimum=1)

    @functools.cached_property
    def query_tokens(self) -> int:
        return self.window_size if self.voters is None else self.voters

    @property
    def per_query_head(self) -> bool:
        return self.group_reduce == "none"

    @functools.cached_property
    def lift(self) -> ops.Lift:
        """What pooling makes of votes along the prefix."""
        if self.pooling == "fading":
            assert self.decay is not None
            return ops.Fading(self.decay)
        assert self.kernel_size is not None
        return ops.Pooling(self.kernel_size, self.pooling)

    @of_any_layer
    def score(self, layer: PromptLayer) -> Tensor:
        """Votes of the window, pooled: (B, Hkv, P) float32, Hq instead of Hkv for "none"."""
        lifted, _ = layer.once(self._voting, self._vote)
        return lifted if self.window_reduce == "mean" else self._raised_to_mean(lifted, layer)

    @functools.cached_property
    def _voting(self) -> tuple[Hashable, ...]:
        """What the scores go by."""
        reduced = self.window_reduce, self.group_reduce
        return (self.window_size, self.query_tokens, *reduced, self.lift, self.sink_tokens)

    def rated(self, prefix: Prefix) -> Tensor:
        """As shares of attention; none is raised to its head's mean."""
        if self.window_reduce == "mean":
            return super().rated(prefix)
        largest, _ = prefix.layer.once(self._voting, self._vote)
        return prefix.ranked(largest / self.summed_weights(prefix.layer))

    def pool(self, votes: Tensor, layer: PromptLayer) -> Tensor:
        """What the layer's votes become before the best are chosen, the same shape."""
        if not self.sink_tokens:
            return self.lift.of(votes)
        lifted = self.lift.of(ops.fill_first(votes, self.sink_tokens, 0.0, layer.pad_tokens))
        return votes.where(layer.is_among_first(self.sink_tokens, votes.shape[-1]), lifted)

    def _vote(self, layer: PromptLayer) -> tuple[Tensor, Tensor]:
        """Votes of the window, pooled, and their sum over its queries before that: as `score`."""
        slots = max(0, layer.keys.shape[2] - self.window_size)
        options: Any = {
            "group_reduce": self.group_reduce if layer.stored_heads is None else "none",
            "impl": layer.votes_impl,
        }
        if self.window_reduce == "mean" and self.query_tokens <= self.window_size:
            summed = self._of_stored_heads(ops.window_votes(layer, **options), layer)
            return self.pool(summed[..., :slots], layer), summed[..., :slots]
        largest, summed = ops.largest_votes(
            layer, self.lift, prefix_tokens=slots, sink_tokens=self.sink_tokens or 0, **options
        )
        if layer.queries.shape[2] > self.window_size:  # or all that vote are kept
            voters = layer.queries.shape[2]
            largest[..., layer.keys.shape[2] - voters :] *= _ON_VOTERS
            if layer.pad_tokens is not None:  # as if there were as many in a row with fewer tokens
                summed *= (voters / layer.row_tokens.clamp(1, voters))[:, None, None]
        summed = self._of_stored_heads(summed, layer)
        if self.window_reduce == "mean":
            return self.pool(summed, layer), summed
        return self._of_stored_heads(largest, layer), summed

    def _of_stored_heads(self, votes: Tensor, layer: PromptLayer) -> Tensor:
        """Votes of query heads reduced where heads of several keys share what is stored."""
        if layer.stored_heads is None:
            return votes
        return ops.reduce_group(votes, layer.num_kv_heads, self.group_reduce)

    def _raised_to_mean(self, votes: Tensor, layer: PromptLayer) -> Tensor:
        """Votes below the mean of their head nearly as high as that, in the same order.

        What a head pays even attention to counts as much together as what one looks at sharply.
        Sinks, which get most, are not in the mean; nor are positions from the first voter on, which
        look at themselves and their neighbours.
        """
        counted = votes[..., : layer.keys.shape[2] - layer.queries.shape[2]]
        sinks, slots = self.sink_tokens or 0, counted.shape[-1]
        if layer.pad_tokens is None:
            means = counted[..., sinks:].sum(-1, True) / max(1, slots - sinks)
        else:
            tokens = (slots - sinks - layer.pad_tokens).clamp(min=1)[:, None, None]
            means = ops.fill_first(counted, sinks, 0.0, layer.pad_tokens).sum(-1, True) / tokens
        return votes.maximum(means.lerp(votes, _ORDER_BELOW_THE_MEAN))

    @torch.no_grad()
    def votes_at_stake(self, layer: PromptLayer) -> VotesAtStake:
        """Sums over the window, whatever `window_reduce` makes of them."""
        return VotesAtStake(
            votes=layer.once(self._voting, self._vote)[1],
            weights=layer.queries.shape[2] * self._heads_summed(layer),
            pad_tokens=layer.pad_tokens,
        )

    def summed_weights(self, layer: PromptLayer) -> int:
        """One of every query that votes; of every head of a group too where these are summed."""
        queries = layer.queries.shape[2] if self.window_reduce == "mean" else 1
        return queries * self._heads_summed(layer)

    def _heads_summed(self, layer: PromptLayer) -> int:
        if self.group_reduce != "sum":
            return 1
        return layer.queries.shape[1] // layer.num_kv_heads
