"""Methods that go around another one and make their choice of its scores."""

import functools

from snapkv.errors import InvalidArgumentError, InvalidTypeError
from snapkv.policies.base import Need, Policy
from snapkv.policies.prefix_policy import PrefixPolicy
from snapkv.policies.spans import Spans
from snapkv.policies.states import PromptLayer, VotesAtStake


class AroundScores(Policy):
    """Asks another method for the scores of the prefix; a subclass says what it does with them."""

    policy: PrefixPolicy

    def _require_scoring(self, hint: str = "") -> None:
        """Raise unless `policy` scores a prefix and leaves the choice to the scores."""
        if not isinstance(self.policy, PrefixPolicy):
            raise InvalidTypeError(
                f"policy: expected a method that scores the prefix, such as SnapKV(budget=1024), "
                f"got {self.policy!r}; pass one of them{hint}"
            )
        if not self.policy.keeps_the_best:
            raise InvalidArgumentError(
                f"policy: expected a method that keeps its best scores, got {self.policy.name}, "
                "which chooses by itself; pass SnapKV, PyramidKV, KeyDiff or another of that kind"
            )

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

    def require_room(self, layer: PromptLayer) -> None:
        self.policy.require_room(layer)

    def votes_at_stake(self, layer: PromptLayer) -> VotesAtStake | None:
        return self.policy.votes_at_stake(layer)
