"""TOVA (Oren et al., 2024): keep the tokens that the last query attends to most."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from snapkv import ops
from snapkv.policies.budget import require_tokens
from snapkv.policies.recent import BestAndRecent
from snapkv.policies.spans import Spans
from snapkv.policies.states import LayerStates
from snapkv.validation import DEFAULT_BUDGET, require_int


@dataclass(frozen=True)
class TOVA(BestAndRecent):
    """Drops the tokens that the last query pays the least attention to, the same in all heads.

    The attention of the newest query is averaged over all query heads of the layer, and the
    `budget` best tokens stay, at the end of the prompt and after every generated token. No token is
    protected, neither the first nor the newest, as in the authors' code. If several tokens are read
    at once, only the last one's attention counts.

    Args:
        budget: tokens kept per layer.

    Raises:
        InvalidTypeError: `budget` is no integer.
        InvalidArgumentError: `budget` is out of range or in bytes.
    """

    name: ClassVar[str] = "tova"
    query_tokens: ClassVar[int] = 1
    recent_tokens: ClassVar[int] = 0

    budget: int = DEFAULT_BUDGET

    def __post_init__(self) -> None:
        require_tokens(self)
        require_int("budget", self.budget, minimum=1)

    @property
    def max_decode_tokens(self) -> int:
        return self.budget

    def rate(self, states: LayerStates) -> Tensor:
        """Compute the attention of the last query to each slot, averaged over all heads.

        Returns:
            (B, 1, S) float32.
        """
        newest = replace(states.without_empty_slots, queries=states.queries[:, :, -1:])
        weights = ops.attention_weights(newest)
        return weights[:, :, -1].mean(dim=1, keepdim=True)

    def require_protection(self, spans: Spans) -> None:
        """Check that the protected tokens leave room for the newest token.

        Raises:
            InvalidArgumentError: the spans have as many tokens as the budget, or more.
        """
        self._require_all_spans(spans, self.budget - 1, "next to its newest token")
