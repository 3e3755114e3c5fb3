"""The methods that a server knows: how they are made, and how much they keep."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from snapkv.errors import InvalidArgumentError
from snapkv.policies import (
    POLICIES,
    TOVA,
    AdaKV,
    Policy,
    PromptLayer,
    Selection,
    SnapKV,
    StreamingLLM,
)
from snapkv.policies.spans import Spans
from snapkv.policies.states import LayerStates
from snapkv_vllm.names import PROTECT_FIRST


def _adakv(*, safeguard: float = AdaKV.safeguard, **of_scores: Any) -> AdaKV:
    return AdaKV(SnapKV(**of_scores), safeguard=safeguard)


METHODS: dict[str, Callable[..., Policy]] = {
    SnapKV.name: SnapKV,
    StreamingLLM.name: StreamingLLM,
    TOVA.name: TOVA,
    AdaKV.name: _adakv,
}
"""Methods of which is known in advance how many tokens a layer keeps, all layers as many."""

_UNSERVABLE = {"keep_ratio", "recent", "policy"}


def parameters_of(method: str) -> list[str]:
    """The names of a method's parameters, with those of the scores that it goes by."""
    kinds = (SnapKV, AdaKV) if method == AdaKV.name else (POLICIES[method],)
    names = [one.name for kind in kinds for one in fields(kind) if one.init]
    return [name for name in names if name not in _UNSERVABLE]


@dataclass(frozen=True)
class ProtectingFirst(Policy):
    """Shows another method the first tokens as protected, like `CompressedCache(protect=...)`."""

    name: ClassVar[str] = "protecting-first"

    policy: Policy
    first_tokens: int

    def __post_init__(self) -> None:
        require_first_protected(self.policy, self.first_tokens)

    @property
    def query_tokens(self) -> int:
        return self.policy.query_tokens

    def select(self, layer: PromptLayer) -> Selection | None:
        return self.policy.select(self._protected(layer))

    def require_cap(self, cap_tokens: int) -> None:
        self.policy.require_cap(cap_tokens)

    def select_under_cap(self, layer: PromptLayer, cap_tokens: int) -> Selection:
        return self.policy.select_under_cap(self._protected(layer), cap_tokens)

    def _protected(self, layer: PromptLayer) -> PromptLayer:
        return replace(layer, protected=protected_first(layer, self.first_tokens))

    def describe(self) -> dict[str, Any]:
        return self.policy.describe() | {"protect_first": self.first_tokens}


def scoring(policy: Policy) -> Policy:
    """The method that scores, inside those around it."""
    while isinstance(policy, ProtectingFirst | AdaKV):
        policy = policy.policy
    return policy


def parts_heads(policy: Policy) -> bool:
    """Whether the heads of a layer keep different numbers of tokens."""
    return (policy.policy if isinstance(policy, ProtectingFirst) else policy).parts_heads


def kept_tokens(policy: Policy, prompt_tokens: int) -> int:
    """Tokens that every layer keeps of a prompt, per KV head; the mean where heads differ."""
    budget: int = getattr(scoring(policy), "budget", prompt_tokens)
    return min(budget, prompt_tokens)


def require_first_protected(policy: Policy, tokens: int) -> None:
    """Raise InvalidArgumentError unless a method keeps the first tokens, and has room for them."""
    try:
        if tokens:
            policy.require_protection(Spans(((0, tokens),)))
    except InvalidArgumentError as error:  # it says `protect`, as the library calls it
        raise InvalidArgumentError(f"{PROTECT_FIRST}{str(error).removeprefix('protect')}") from None


def protected_first(layer: LayerStates, tokens: int) -> Tensor:
    """Those of the slots that hold the first tokens, which are its first: (rows, 1, S) bool."""
    slots = torch.arange(layer.keys.shape[2], device=layer.keys.device)
    return Spans(((0, tokens),)).cover(slots).expand(layer.keys.shape[0], 1, -1)
