"""The full cache as a policy, which is the baseline of every comparison."""

from dataclasses import dataclass
from typing import ClassVar

from snapkv.policies.base import Policy
from snapkv.policies.spans import Spans
from snapkv.policies.states import PromptLayer, Selection


@dataclass(frozen=True)
class FullCache(Policy):
    """A policy that keeps all tokens, as the cache of transformers does."""

    name: ClassVar[str] = "full"
    query_tokens: ClassVar[int] = 0

    def select(self, layer: PromptLayer) -> Selection | None:
        return None

    def require_protection(self, spans: Spans) -> None:
        """Do nothing, because this policy keeps all tokens anyway."""
