"""A cache that is played with, and all that was done to it."""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from snapkv import CompressedCache


@dataclass
class Part:
    """A part of what was read: a turn, a step, or a crop that is to be done alone, too.

    Attributes:
        kind: "turn", "step" or "crop".
        start: column of its first token; of a crop, tokens seen before.
        stop: column behind the last one that was read; of a crop, tokens seen after.
        ids: (R, stop - start), what was read.
        end: of a turn, where it will end; None where the next pass will tell.
        passes: of a turn, how it was read: the function's name, up to which column, numbers.
    """

    kind: str
    start: int
    stop: int
    ids: Tensor
    end: int | None = None
    passes: list[tuple[Any, ...]] = field(default_factory=list)


@dataclass
class State:
    """A cache and all that was done to it.

    Attributes:
        cache: the one that is judged.
        full: the oracle's, or None where it cannot follow.
        ids: (R, tokens seen).
        pads: (R,) leading columns of each row that are none of its tokens.
        done: what was read, but for the turn that is open.
        turn: the turn that is open, or None.
        prompt_end: as the cache was told, or None.
        logits: (R, N, V) of the last N columns of the turn that is open.
        alone: for each row a cache that has read it alone, and how many parts; None until asked.
        short_by: queries that crops took of the last ones, which vote at the end of a short turn.
        resumed_at: tokens seen after the last of those crops.
        fewer_votes: whether a crop has taken queries that have voted alone; then only the numbers
            of kept tokens are alike.
    """

    cache: CompressedCache
    full: DynamicCache | None
    ids: Tensor
    pads: Tensor
    done: list[Part] = field(default_factory=list)
    turn: Part | None = None
    prompt_end: int | None = None
    logits: Tensor | None = None
    alone: list[tuple[CompressedCache, int] | None] = field(default_factory=list)
    short_by: int = 0
    resumed_at: int = 0
    fewer_votes: bool = False

    @property
    def seen(self) -> int:
        """Columns that were read."""
        return self.ids.shape[1]

    @property
    def rows(self) -> int:
        """R."""
        return self.ids.shape[0]

    def mask(self, stop: int) -> Tensor:
        """(R, stop) int64, zero for pads."""
        return (torch.arange(stop) >= self.pads[:, None]).long()

    def positions(self, start: int, stop: int) -> Tensor:
        """(R, stop - start) int64."""
        return (torch.arange(start, stop) - self.pads[:, None]).clamp(min=0)

    def branch(self, cache: CompressedCache) -> "State":
        """The same for a copy of the cache."""
        return replace(
            self,
            cache=cache,
            full=copy.deepcopy(self.full),
            done=list(self.done),
            turn=copy.deepcopy(self.turn),
            alone=[None] * self.rows,
        )
