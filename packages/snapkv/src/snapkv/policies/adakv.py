"""Ada-KV (Feng et al., 2024): heads with dispersed attention keep more, focused ones less."""

import functools
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

from torch import Tensor

from snapkv.policies.around import AroundScores
from snapkv.policies.budget import counts_of_best, largest_remainder
from snapkv.policies.prefix import Prefix
from snapkv.policies.prefix_policy import PrefixPolicy
from snapkv.policies.snapkv import SnapKV
from snapkv.policies.states import PromptLayer, Selection
from snapkv.validation import require_ratio


@dataclass(frozen=True)
class AdaKV(AroundScores):
    """Shares the budget of a layer out among its heads, by the scores of another policy.

    The best-scored entries of all heads of a layer together decide how many each head keeps; a
    head is sure of `safeguard` of its even share. The counts add up exactly, where the authors'
    rounding can lose or gain a slot per head. Heads of different length are stored one behind the
    other, so the bytes held are those of the tokens kept.

    Args:
        policy: the method that scores, with its budget: tokens per head on average.
        safeguard: the part of the even share that every head keeps, in (0, 1]; 1 is the policy
            itself. 0.2 as in the authors' paper and kvpress; the authors' code defaults to 0.5.

    Raises:
        InvalidTypeError: `policy` does not score a prefix.
        InvalidArgumentError: `safeguard` out of range.
    """

    name: ClassVar[str] = "adakv"
    per_head_budget: ClassVar[bool] = True

    policy: PrefixPolicy = field(default_factory=SnapKV)
    _: KW_ONLY
    safeguard: float = 0.2

    def __post_init__(self) -> None:
        self._require_scoring()
        require_ratio("safeguard", self.safeguard)

    def select(self, layer: PromptLayer) -> Selection | None:
        """Keep the window in every head, and of the prefix what its share allows."""
        prefix = self.policy.prefix(layer, per_head_budget=True)
        means = self.policy.counts(prefix)
        if means == prefix.lengths:
            return None
        scores = self.policy.scored(prefix)
        if scores.shape[1] == 1:
            return self.policy.select(layer)  # no heads to share among
        return prefix.select_by_head(scores, self._head_budgets(prefix, scores, means))

    @functools.cached_property
    def chooses_of_stacks(self) -> bool:
        return self.policy.chooses_of_stacks

    @property
    def chooses_from_a_part(self) -> bool:
        return self.policy.chooses_from_a_part

    def _head_budgets(self, prefix: Prefix, scores: Tensor, means: list[int]) -> list[list[int]]:
        """B lists of H numbers: positions of each head, `means` on average over a row's."""
        heads, sure = scores.shape[1], prefix.needed or prefix.sinks
        won = counts_of_best(prefix.ranked(scores), [mean * heads for mean in means]).tolist()
        return list(map(self._of_row, won, means, sure))

    def _of_row(self, won: list[int], mean: int, sure: int) -> list[int]:
        """Positions of each head that has won so many, of which so many are sure in every head."""
        sure = min(sure, mean)
        contested = mean - sure
        if not contested:
            won = [sure] * len(won)
        shares = [
            sure + float(own - sure) * (1 - self.safeguard) + contested * self.safeguard
            for own in won
        ]
        return largest_remainder(shares, mean * len(won))
