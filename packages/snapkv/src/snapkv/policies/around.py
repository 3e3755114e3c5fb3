"""The base of methods that wrap another method and select by its scores."""

import functools

from snapkv.errors import InvalidTypeError, wrong
from snapkv.policies.base import Need, Policy
from snapkv.policies.prefix_policy import PrefixPolicy
from snapkv.policies.spans import Spans
from snapkv.policies.states import PromptLayer, VotesAtStake


class AroundScores(Policy):
    """A policy that wraps another policy, and selects positions by its scores."""

    policy: PrefixPolicy

    def _require_scoring(self, hint: str = "") -> None:
        """Check that the wrapped policy scores the prefix and keeps its best scores.

        Args:
            hint: an addition to the remedy if `policy` is of the wrong type.

        Raises:
            InvalidTypeError: `policy` is not a `PrefixPolicy`.
            InvalidArgumentError: `policy` selects by something else than its scores.
        """
        if not isinstance(self.policy, PrefixPolicy):
            problem = f"expected a method that scores the prompt's tokens, but got {self.policy!r}"
            raise wrong("policy", problem, f"Use SnapKV(budget=1024){hint}", InvalidTypeError)
        if not self.policy.keeps_the_best:
            problem = f"the method {self.policy.name} does not select tokens only by their scores"
            raise wrong("policy", problem, "Use SnapKV, PyramidKV or KeyDiff instead")

    @functools.cached_property
    def query_tokens(self) -> int:
        return self.policy.query_tokens

    @property
    def per_query_head(self) -> bool:
        return self.policy.per_query_head

    @property
    def promised_window(self) -> int:
        return self.policy.promised_window

    @property
    def needs(self) -> frozenset[Need]:
        return self.policy.needs

    def require_protection(self, spans: Spans) -> None:
        self.policy.require_protection(spans)

    def require_fit(self, layer: PromptLayer) -> None:
        self.policy.require_fit(layer)

    def votes_at_stake(self, layer: PromptLayer) -> VotesAtStake | None:
        return self.policy.votes_at_stake(layer)
