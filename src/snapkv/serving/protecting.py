"""A method that also keeps the first tokens of every prompt, whatever their scores."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from snapkv.policies import Policy, PromptLayer, Selection
from snapkv.policies.spans import Spans


@dataclass(frozen=True)
class ProtectingFirst(Policy):
    """Shows another method the first tokens as protected, as `CompressedCache(protect=...)` does.

    Args:
        policy: what chooses, with its budget; they count towards that.
        first_tokens: how many, at least 1.

    Raises:
        InvalidArgumentError: the budget has no room for them.
    """

    name: ClassVar[str] = "protecting-first"

    policy: Policy
    first_tokens: int

    def __post_init__(self) -> None:
        """Check that they fit."""
        self.policy.require_protection(self._spans)

    @property
    def _spans(self) -> Spans:
        return Spans(((0, self.first_tokens),))

    @property
    def query_tokens(self) -> int:
        """What the method wants."""
        return self.policy.query_tokens

    def select(self, layer: PromptLayer) -> Selection | None:
        """What the method keeps beside them."""
        positions = torch.arange(layer.keys.shape[2], device=layer.keys.device)
        protected = self._spans.cover(positions).expand(layer.keys.shape[0], 1, -1)
        return self.policy.select(replace(layer, protected=protected))

    def describe(self) -> dict[str, Any]:
        """The method's own, and how many tokens are protected."""
        return self.policy.describe() | {"protect_first": self.first_tokens}
