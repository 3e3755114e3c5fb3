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
"""The weight of a vote's distance below its head's mean, which keeps the better of two low
votes."""

_ON_VOTERS = 0.25
"""The weight of a largest vote on a voter, because voters look at themselves and their neighbours
most."""


@dataclass(frozen=True)
class SnapKV(PrefixPolicy):
    """Lets the last queries of the prompt vote, and keeps the positions with the most votes.

    The attention of the last `window_size` queries to the prefix is summed (Eq. 2), combined over
    the query heads that share a KV head, and pooled so that the neighbours of a strong position are
    kept with it (Sec. 4.3). The best positions are kept beside the window (Listing 1). The paper's
    settings: LongBench window 32, kernel 7, max; needle tests window 16, kernel 5.

    Args:
        budget: tokens kept per KV head and layer, window included; 1024 if neither is given. "auto"
            lets the votes choose for every layer, see `AutoBudget`.
        keep_ratio: instead of `budget`, the fraction of the prefix to keep beside the window.
        window_size: the last tokens of the prompt; they vote and are always kept.
        kernel_size: width of "max" and "avg" pooling, odd and centred, 7 by default; 1 turns
            pooling off. Or a pair ``(before, behind)``: how far a vote reaches to either side.
        pooling: "max" or "avg" over neighbours, as in the paper; or "fading": a vote raises the
            positions after it, by a factor that falls with every token, because what is copied next
            follows the position that gets the votes.
        decay: that factor of "fading" per token, in (0, 1), 0.935 by default.
        sink_tokens: first tokens that each head keeps, and whose votes raise no neighbours:
            attention sinks get most of the votes, and nothing after them is copied. 4 with
            "fading", else 0, as in the paper.
        group_reduce: how the query heads of a KV head are combined: "mean", "max", "sum"; "none"
            lets every query head keep its own positions, as the paper does, but then keys and
            values are stored once per query head.
        window_reduce: how the queries of the window are combined. "mean", as in the paper, adds
            their weights up and then pools. "max" pools the weights of each query, scales them back
            to their own sum, and takes the largest, so that what one query needs counts whatever
            the others look at (DefensiveKV, Feng et al., ICLR 2026). If heads or layers share a
            budget, a head's scores are then at least its mean, within a thousandth.
        voters: how many of the last tokens vote, if not `window_size`: fewer, or more than the
            window keeps. Votes on a voter are those of the voters after it; with "max" as
            `window_reduce` they count a quarter.

    Raises:
        InvalidTypeError: a value has the wrong type.
        InvalidArgumentError: a value is out of range, or two parameters contradict each other.
    """

    name: ClassVar[str] = "snapkv"
    scores_after_drops: ClassVar[bool] = True
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
        elif isinstance(self.kernel_size, list):  # JSON has no tuples
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
        """The way in which votes are pooled along the prefix."""
        if self.pooling == "fading":
            assert self.decay is not None
            return ops.Fading(self.decay)
        assert self.kernel_size is not None
        return ops.Pooling(self.kernel_size, self.pooling)

    @of_any_layer
    def score(self, layer: PromptLayer) -> Tensor:
        """Return the pooled votes of the observation window.

        With ``window_reduce="max"`` the votes of a head are at least about their mean.

        Returns:
            (B, Hkv, P) float32; Hq heads for ``group_reduce="none"``.
        """
        lifted, _ = layer.compute_once(self._voting, self._vote)
        return lifted if self.window_reduce == "mean" else self._raised_to_mean(lifted, layer)

    @functools.cached_property
    def _voting(self) -> tuple[Hashable, ...]:
        """The parameters on which the votes depend, used as a key in `PromptLayer.compute_once`."""
        reduced = self.window_reduce, self.group_reduce
        return (self.window_size, self.query_tokens, *reduced, self.lift, self.sink_tokens)

    def compute_shares(self, prefix: Prefix) -> Tensor:
        """Compute the share of the window's attention that each position receives.

        Unlike in `score`, votes below the mean of their head are not raised.

        Returns:
            (B, H, P) float32: infinity for positions that must be kept, minus infinity for padding.

        Raises:
            InvalidArgumentError: the votes are NaN, which is only checked if `window_reduce` is
                "mean".
        """
        if self.window_reduce == "mean":
            return super().compute_shares(prefix)
        largest, _ = prefix.layer.compute_once(self._voting, self._vote)
        return prefix.mark_required(largest / self.summed_weights(prefix.layer))

    def pool(self, votes: Tensor, layer: PromptLayer) -> Tensor:
        """Pool the votes along the prefix, except for the votes on attention sinks.

        Args:
            votes: (B, H, P) float32, which stays unchanged.
            layer: the layer of the votes.

        Returns:
            The pooled votes in the shape of `votes`; those on sinks are unchanged.
        """
        if not self.sink_tokens:
            return self.lift.pool(votes)
        lifted = self.lift.pool(ops.fill_first(votes, self.sink_tokens, 0.0, layer.pad_tokens))
        return votes.where(layer.is_among_first(self.sink_tokens, votes.shape[-1]), lifted)

    def _vote(self, layer: PromptLayer) -> tuple[Tensor, Tensor]:
        """Count the votes of the observation window.

        Returns:
            The pooled votes in the shape of `score`, and their sum over the queries before pooling.
        """
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
        if layer.queries.shape[2] > self.window_size:  # else all voters are kept with the window
            voters = layer.queries.shape[2]
            largest[..., layer.keys.shape[2] - voters :] *= _ON_VOTERS
            if layer.pad_tokens is not None:  # a short row has fewer voters, so scale their sum up
                summed *= (voters / layer.row_tokens.clamp(1, voters))[:, None, None]
        summed = self._of_stored_heads(summed, layer)
        if self.window_reduce == "mean":
            return self.pool(summed, layer), summed
        return self._of_stored_heads(largest, layer), summed

    def _of_stored_heads(self, votes: Tensor, layer: PromptLayer) -> Tensor:
        """Combine the votes of all query heads if they share one stored latent."""
        if layer.stored_heads is None:
            return votes
        return ops.reduce_group(votes, layer.num_kv_heads, self.group_reduce)

    def _raised_to_mean(self, votes: Tensor, layer: PromptLayer) -> Tensor:
        """Raise all votes that are below the mean of their head, and keep their order.

        So a head that attends evenly to many positions counts as much in total as one that looks
        sharply at a few. The mean leaves out sinks, which get most votes, and positions from the
        first voter on, which look at themselves and their neighbours.
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
        """Return the sum of the votes over the window, even if `window_reduce` is "max"."""
        return VotesAtStake(
            votes=layer.compute_once(self._voting, self._vote)[1],
            weights=layer.queries.shape[2] * self._heads_summed(layer),
            pad_tokens=layer.pad_tokens,
        )

    def summed_weights(self, layer: PromptLayer) -> int:
        """Return the number of attention weights that are added up in one vote.

        These are the weights of all voters, and with "sum" those of all heads of a group.
        """
        queries = layer.queries.shape[2] if self.window_reduce == "mean" else 1
        return queries * self._heads_summed(layer)

    def _heads_summed(self, layer: PromptLayer) -> int:
        if self.group_reduce != "sum":
            return 1
        return layer.queries.shape[1] // layer.num_kv_heads
