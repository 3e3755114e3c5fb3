"""The two ways to pool votes along the prefix: over neighbours, or by fading."""

from dataclasses import dataclass

import torch
from torch import Tensor

from snapkv.ops.votes.api import fade_votes
from snapkv.ops.votes.reference import CHUNK, LEAST_SUM, Lift, pool_votes


@dataclass(frozen=True)
class Pooling(Lift):
    """Pools votes over their neighbours, as `snapkv.ops.pool_votes` does.

    Attributes:
        kernel_size: width, or how far a vote reaches to either side.
        how: "max" or "avg".
    """

    kernel_size: int | tuple[int, int]
    how: str

    def pool(self, votes: Tensor) -> Tensor:
        return pool_votes(votes, self.kernel_size, self.how)

    def pool_rows(self, weights: Tensor) -> Tensor:
        return pool_votes(weights.mT, self.kernel_size, self.how).mT


@dataclass(frozen=True)
class Fading(Lift):
    """Lets votes raise the positions after them, as `snapkv.ops.fade_votes` does.

    Attributes:
        decay: the factor per position, in (0, 1).
    """

    decay: float

    def pool(self, votes: Tensor) -> Tensor:
        return fade_votes(votes, self.decay)

    def pool_rows(self, weights: Tensor) -> Tensor:
        """Fade in two passes over every chunk; changes `weights` in place.

        The first pass finds what each chunk carries on to the next, the second adds what came in.
        """
        N, P, R = weights.shape
        first, *others = weights.view(N, P // CHUNK, CHUNK, R).unbind(2)
        carried = first.clone()
        for place in others:
            torch.maximum(carried.mul_(self.decay), place, out=carried)
        self._carry_on(carried, self.decay**CHUNK)
        brought = torch.zeros_like(first)
        torch.mul(carried[:, :-1], self.decay, out=brought[:, 1:])
        last = torch.maximum(first, brought, out=first)
        for place in others:
            torch.mul(last, self.decay, out=brought)
            last = torch.maximum(place, brought, out=place)
        return weights

    def _carry_on(self, carried: Tensor, factor: float) -> None:
        """Fade (N, chunks, R) along the chunks in doubling steps; changes `carried` in place."""
        width = 1
        while width < carried.shape[1] and factor > LEAST_SUM:
            behind = carried[:, width:]
            torch.maximum(behind, carried[:, :-width] * factor, out=behind)
            width, factor = 2 * width, factor * factor
