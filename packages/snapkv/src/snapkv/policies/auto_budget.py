"""A budget that the votes choose: each layer keeps as much as its heads look at."""

import math
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from snapkv.errors import InvalidArgumentError
from snapkv.validation import AUTO, require_fraction, require_int

UNDILUTED_TOKENS = 1024
"""Up to here a vote weighs the same; of a longer prompt each position gets a smaller share of the
window's attention, and so does the one that is the answer: see `docs/results/auto_budget.md`."""


def dilution(tokens: float) -> float:
    """By how much a vote on a prompt of so many tokens weighs more than its share says."""
    return max(1.0, tokens / UNDILUTED_TOKENS)


@dataclass(frozen=True, kw_only=True)
class AutoBudget:
    """As many positions as it takes to lose none that the window looked at.

    A layer keeps the smallest number at which, in every head, all positions are kept whose pooled
    vote is more than `lost_vote` of the window's attention; of a prompt longer than 1,024 tokens,
    more than as much less as it is longer. So a layer with focused heads keeps few, one with
    dispersed heads many. The bound is on the highest vote that is lost and not on the sum of them,
    which tells less about whether an answer is right: `docs/results.md`.

    Args:
        lost_vote: the highest share of a query's attention, mean over the window, that a position
            may have and be dropped, in (0, 1), in a prompt of up to 1,024 tokens.
        least: positions that every layer keeps beside the window, whatever the votes.
        most: tokens that no layer keeps more of, the window included; None for no limit.

    Raises:
        InvalidArgumentError: a value out of range.
        InvalidTypeError: a value of the wrong type.
    """

    lost_vote: float = 0.0015
    least: int = 32
    most: int | None = None

    def __post_init__(self) -> None:
        """Check every parameter once, here."""
        require_fraction("lost_vote", self.lost_vote, "0.0015")
        require_int("least", self.least, minimum=1)
        if self.most is not None:
            require_int("most", self.most, minimum=self.least + 1)

    @classmethod
    def read(cls, budget: object) -> object:
        """The budget that "auto", or what `describe` gives, stands for; anything else as it is.

        Raises:
            InvalidArgumentError: a dictionary that is none.
        """
        if budget == AUTO:
            return cls()
        if not isinstance(budget, dict):
            return budget
        known = {field.name for field in fields(cls)}
        own = budget.get(AUTO)
        if budget.keys() != {AUTO} or not isinstance(own, dict) or not own.keys() <= known:
            raise InvalidArgumentError(
                f"budget: expected a number of tokens, 'auto' or {{'auto': {{...}}}} with "
                f"{', '.join(sorted(known))}, got {budget!r}; pass one of them"
            )
        return cls(**own)

    def describe(self) -> dict[str, Any]:
        """Its parameters, ready for JSON."""
        return {AUTO: {field.name: getattr(self, field.name) for field in fields(self)}}

    def require_window(self, window_size: int) -> None:
        """Raise unless `most` has room for a window and what every layer keeps beside it.

        Raises:
            InvalidArgumentError: it has not.
        """
        if self.most is not None and self.most < window_size + self.least:
            raise InvalidArgumentError(
                f"budget, most: expected at least window_size={window_size} + least={self.least}, "
                f"which every layer keeps, got {self.most}; raise most or lower least"
            )

    def voted(self, shares: Tensor) -> Tensor:
        """How many positions of every head may not be lost: (B, H) int64.

        Args:
            shares: (B, H, P) float32, pooled votes as shares of the window's attention; infinity
                for what must stay, minus infinity for pads.
        """
        tokens = (shares > -math.inf).sum(dim=-1, keepdim=True)
        bound = self.lost_vote / (tokens / UNDILUTED_TOKENS).clamp(min=1.0)
        return (shares > bound).sum(dim=-1)

    def within(self, voted: int, prefix_tokens: int, window_size: int) -> int:
        """Positions of a prefix to keep, where so many may not be lost."""
        most = prefix_tokens if self.most is None else max(self.most - window_size, 0)
        return min(max(voted, self.least), most, prefix_tokens)
