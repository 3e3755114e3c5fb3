"""The methods that a server knows: how they are made, and how much they keep."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from snapkv.policies import POLICIES, TOVA, AdaKV, Policy, SnapKV, StreamingLLM
from snapkv_vllm.protecting import ProtectingFirst


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


def scoring(policy: Policy) -> Policy:
    """The method that scores, inside those around it."""
    while isinstance(policy, ProtectingFirst | AdaKV):
        policy = policy.policy
    return policy


def parts_heads(policy: Policy) -> bool:
    """Whether the heads of a layer keep different numbers of tokens."""
    return (policy.policy if isinstance(policy, ProtectingFirst) else policy).parts_heads


def kept_tokens(policy: Policy, prompt_tokens: int) -> int:
    """Tokens that every layer keeps of a prompt, per KV head; the mean where heads differ.

    Args:
        policy: what `ServingSettings.for_request` gave.
        prompt_tokens: length of the prompt.
    """
    budget: int = getattr(scoring(policy), "budget", prompt_tokens)
    return min(budget, prompt_tokens)
