"""Votes of states in half precision, a few KV heads at a time, in as few passes as can be.

Products of numbers in half precision are exact in float32, and in float32 they are summed; scores
are scaled when the highest has been taken off them. Exponentials are in base two, and one product
does for the shares of the softmax, the sum over the window and that over a group. So votes are
those of `snapkv.ops.votes.blocked` but for the rounding of exponentials. Axes as in
`snapkv.ops.votes.reference`.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from snapkv.ops.scores import ScoreOptions
from snapkv.ops.votes import blocked
from snapkv.ops.votes.reference import reduce_group

MOST_BYTES = 8 << 20
"""Of scores at a time; more would leave the processor's caches between two passes."""

MOST_BYTES_OF_A_HEAD = 64 << 20
"""KV heads whose scores take more are voted on in blocks of keys."""

_LOG2_E = math.log2(math.e)


def window_votes(
    queries: Tensor,
    keys: Tensor,
    score_options: ScoreOptions,
    *,
    pad_tokens: Tensor | None = None,
    group_reduce: str = "none",
) -> Tensor:
    """As `snapkv.ops.votes.reference.window_votes`, up to rounding."""
    B, Hq, W, _ = queries.shape
    Hkv, T = keys.shape[1:3]
    of_a_head = 4 * (Hq // Hkv) * W * T
    if not 0 < of_a_head <= MOST_BYTES_OF_A_HEAD:
        return blocked.window_votes(
            queries, keys, score_options, pad_tokens=pad_tokens, group_reduce=group_reduce
        )
    apart = Hq // Hkv if group_reduce in ("none", "max") else 1
    heads = _Heads.of(queries, keys, score_options, pad_tokens)
    votes = queries.new_empty((B * Hkv, apart, T - W), dtype=torch.float32)
    at_once = max(1, MOST_BYTES // of_a_head)
    for start in range(0, B * Hkv, at_once):
        some = slice(start, start + at_once)
        votes[some] = heads.part(some).votes(W, apart)
    if group_reduce == "mean":
        votes /= Hq // Hkv
    votes = votes.view(B, Hkv * apart, T - W)
    return reduce_group(votes, Hkv, "max") if group_reduce == "max" else votes


@dataclass(frozen=True)
class _Heads:
    """KV heads of all rows of a batch, one after the other: N of them.

    Attributes:
        queries: (N, G * W, D) float32.
        keys: (N, T, D), in the model's precision.
        flattening: factor on the products before their tangent is taken; None where none is.
        slope: factor on the scores that are left, for exponentials in base two.
        sinks: (N, G * W, 1) float32, by the same slope; or None.
        pads: (N,), or None.
    """

    queries: Tensor
    keys: Tensor
    flattening: float | None
    slope: float
    sinks: Tensor | None
    pads: Tensor | None

    @classmethod
    def of(
        cls, queries: Tensor, keys: Tensor, options: ScoreOptions, pad_tokens: Tensor | None
    ) -> Self:
        """All heads, with what they vote by."""
        B, Hq, W, D = queries.shape
        Hkv = keys.shape[1]
        rows = B * Hkv, Hq // Hkv * W
        flattening, slope = None, options.scaling * _LOG2_E
        if options.softcap is not None:
            flattening, slope = options.scaling / options.softcap, options.softcap * _LOG2_E
        sinks = options.sink_logits
        if sinks is not None:
            sinks = sinks.float().mul(_LOG2_E / slope).view(1, Hq, 1).expand(B, Hq, W)
            sinks = sinks.reshape(*rows, 1)
        return cls(
            queries=queries.float().reshape(*rows, D),
            keys=keys.flatten(0, 1),
            flattening=flattening,
            slope=slope,
            sinks=sinks,
            pads=None if pad_tokens is None else pad_tokens.repeat_interleave(Hkv),
        )

    def part(self, some: slice) -> Self:
        """Some of the heads."""
        return type(self)(
            queries=self.queries[some],
            keys=self.keys[some],
            flattening=self.flattening,
            slope=self.slope,
            sinks=None if self.sinks is None else self.sinks[some],
            pads=None if self.pads is None else self.pads[some],
        )

    def votes(self, window: int, apart: int) -> Tensor:
        """(N, apart, P): summed over a group's query heads, or over those of each part of it."""
        scores = self._scores(window)
        highest = scores.amax(dim=-1, keepdim=True)
        if self.sinks is not None:
            highest = highest.maximum(self.sinks)
        shift = blocked.finite(highest)
        total = scores.sub_(shift).mul_(self.slope).exp2_().sum(dim=-1, keepdim=True)
        if self.sinks is not None:
            total += (self.sinks - shift).mul_(self.slope).exp2_()
        heads, rows, T = scores.shape
        shares = total.masked_fill_(total == 0, 1.0).reciprocal_().view(heads, apart, 1, -1)
        by_part = scores.view(heads, apart, rows // apart, T)[..., : T - window]
        return (shares @ by_part).squeeze(2)

    def _scores(self, window: int) -> Tensor:
        """(N, G * W, T), but for the slope."""
        scores = self.queries @ self.keys.float().mT
        if self.flattening is not None:
            scores.mul_(self.flattening).tanh_()
        T = scores.shape[-1]
        blocked.hide_unseen(scores.view(len(scores), -1, window, T), 0, T, self.pads)
        return scores
