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
    """Shares the budget of a layer among its heads, according to the scores of another policy.

    The best-scored positions of all heads of a layer together decide how many positions each head
    keeps. A head is guaranteed `safeguard` of its even share. The counts add up exactly, where the
    authors' rounding can lose or gain a slot per head. Heads of different lengths are stored one
    after the other, so the memory is that of the kept tokens.

    Args:
        policy: the method that scores, with its budget: tokens per head on average.
        safeguard: the fraction of the even share that every head keeps, in (0, 1]; 1 is the policy
            itself. 0.2 as in the authors' paper and kvpress; the authors' code defaults to 0.5.

    Raises:
        InvalidTypeError: `policy` does not score a prefix.
        InvalidArgumentError: `policy` does not keep its best scores, or `safeguard` is out of
            range.
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
        """Select the window, and the best positions before it with a budget for each head.

        Returns:
            The selection, in which heads keep different numbers of tokens; None if everything fits.
            If there is a single head, the selection of `policy`.

        Raises:
            InvalidArgumentError: the tokens that must be kept do not fit; or the policy returned
                scores of another shape or dtype, or NaN.
            BudgetTooSmallError: a budget in bytes cannot hold the window and the sinks.
        """
        prefix = self.policy.prefix(layer, per_head_budget=True)
        means = self.policy.counts(prefix)
        if means == prefix.lengths:
            return None
        scores = self.policy.compute_scores(prefix)
        if scores.shape[1] == 1:
            return self.policy.select(layer)  # no heads to share among
        return prefix.select_by_head(scores, self._head_budgets(prefix, scores, means))

    @functools.cached_property
    def can_select_stacked(self) -> bool:
        return self.policy.can_select_stacked

    @property
    def can_select_after_drops(self) -> bool:
        return self.policy.can_select_after_drops

    def _head_budgets(self, prefix: Prefix, scores: Tensor, means: list[int]) -> list[list[int]]:
        """Return the number of positions that each head keeps: B lists of H numbers.

        Args:
            prefix: the positions before the window.
            scores: (B, H, P) float32.
            means: B numbers, how many positions a head of each row keeps on average.
        """
        heads, sure = scores.shape[1], prefix.required_counts or prefix.sinks
        ranked, totals = prefix.mark_required(scores), [mean * heads for mean in means]
        return list(map(self._of_row, counts_of_best(ranked, totals).tolist(), means, sure))

    def _of_row(self, won: list[int], mean: int, sure: int) -> list[int]:
        """Return the budgets of the heads of one row, whose average is `mean`.

        Args:
            won: how many of the row's best positions are in each head.
            mean: how many positions a head keeps on average.
            sure: how many positions every head must keep.
        """
        sure = min(sure, mean)
        contested = mean - sure
        if not contested:
            won = [sure] * len(won)
        shares = [
            sure + float(own - sure) * (1 - self.safeguard) + contested * self.safeguard
            for own in won
        ]
        return largest_remainder(shares, mean * len(won))
