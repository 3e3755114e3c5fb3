"""The two ways to pool votes along the prefix: over neighbours, or by fading."""

from dataclasses import dataclass

import torch
from torch import Tensor

from snapkv.ops.votes.api import fade_votes
from snapkv.ops.votes.reference import CHUNK, LEAST_SUM, Lift, pool_votes


@dataclass(frozen=True)
class Pooling(Lift):
    """Pools each vote with the votes of its neighbours, as in the paper.

    See `snapkv.ops.pool_votes`.

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
    """Increases the votes of the positions that follow a position with many votes.

    See `snapkv.ops.fade_votes`.

    Attributes:
        decay: the factor per position, in (0, 1).
    """

    decay: float

    def pool(self, votes: Tensor) -> Tensor:
        return fade_votes(votes, self.decay)

    def pool_rows(self, weights: Tensor) -> Tensor:
        """Fade the weights of each query along the prefix, in place.

        There are two passes over every chunk. The first computes the faded weight at the end of
        each chunk. The second fades the weights within each chunk, beginning with the weight at the
        end of the chunk before it.

        Args:
            weights: (N, P, R) float32, none negative, P a multiple of `CHUNK`.

        Returns:
            `weights`.
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
        """Fade the last weight of each chunk along the chunks, in place.

        Args:
            carried: (N, chunks, R), changed in place.
            factor: the factor per chunk.
        """
        width = 1
        while width < carried.shape[1] and factor > LEAST_SUM:
            behind = carried[:, width:]
            torch.maximum(behind, carried[:, :-width] * factor, out=behind)
            width, factor = 2 * width, factor * factor
