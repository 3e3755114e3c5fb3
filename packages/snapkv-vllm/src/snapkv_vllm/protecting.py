"""A method that also keeps the first tokens of every prompt, whatever their scores."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from snapkv.errors import InvalidArgumentError
from snapkv.policies import Policy, PromptLayer, Selection
from snapkv.policies.spans import Spans
from snapkv.policies.states import LayerStates
from snapkv_vllm.names import PROTECT_FIRST


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
        require_first_protected(self.policy, self.first_tokens)

    @property
    def query_tokens(self) -> int:
        """What the method wants."""
        return self.policy.query_tokens

    def select(self, layer: PromptLayer) -> Selection | None:
        """What the method keeps beside them."""
        return self.policy.select(self._protected(layer))

    def require_cap(self, cap_tokens: int) -> None:
        """Raise unless the method can hold to the cap."""
        self.policy.require_cap(cap_tokens)

    def select_under_cap(self, layer: PromptLayer, cap_tokens: int) -> Selection:
        """What the method holds beside them; they are the first that are held."""
        return self.policy.select_under_cap(self._protected(layer), cap_tokens)

    def _protected(self, layer: PromptLayer) -> PromptLayer:
        return replace(layer, protected=protected_first(layer, self.first_tokens))

    def describe(self) -> dict[str, Any]:
        """The method's own, and how many tokens are protected."""
        return self.policy.describe() | {"protect_first": self.first_tokens}


def require_first_protected(policy: Policy, tokens: int) -> None:
    """Raise unless a method keeps the first tokens, and has room for them.

    Raises:
        InvalidArgumentError: it does not.
    """
    try:
        if tokens:
            policy.require_protection(first_spans(tokens))
    except InvalidArgumentError as error:  # it says `protect`, as the library calls it
        raise InvalidArgumentError(f"{PROTECT_FIRST}{str(error).removeprefix('protect')}") from None


def first_spans(tokens: int) -> Spans:
    """The first tokens, as the library calls them."""
    return Spans(((0, tokens),))


def protected_first(layer: LayerStates, tokens: int) -> Tensor:
    """Those of the slots that hold the first tokens, which are its first: (rows, 1, S) bool."""
    slots = torch.arange(layer.keys.shape[2], device=layer.keys.device)
    return first_spans(tokens).cover(slots).expand(layer.keys.shape[0], 1, -1)
