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
    AcrossLayers,
    AdaKV,
    Policy,
    PromptLayer,
    Selection,
    SnapKV,
    StreamingLLM,
)
from snapkv.policies.default import default_parameters, default_policy
from snapkv.policies.spans import Spans
from snapkv.validation import DEFAULT, MOST
from snapkv_vllm.admission.names import PROTECT_FIRST
from snapkv_vllm.admission.spans import RequestSpans


def _adakv(*, safeguard: float = AdaKV.safeguard, **of_scores: Any) -> AdaKV:
    return AdaKV(SnapKV(**of_scores), safeguard=safeguard)


def _default(**given: Any) -> SnapKV:
    return SnapKV(**default_parameters(given))


METHODS: dict[str, Callable[..., Policy]] = {
    DEFAULT: _default,
    SnapKV.name: SnapKV,
    StreamingLLM.name: StreamingLLM,
    TOVA.name: TOVA,
    AdaKV.name: _adakv,
    AcrossLayers.name: default_policy,
}
"""Methods of which is known in advance how many tokens a layer keeps, all as many or on average."""

_UNSERVABLE = {"budget", "keep_ratio", "recent", "policy"}


def parameter_names(method: str) -> list[str]:
    """The names of a method's parameters beside the budget, with those of its scores."""
    around = {DEFAULT: (SnapKV,), AdaKV.name: (SnapKV, AdaKV), AcrossLayers.name: (SnapKV,)}
    kinds = around.get(method) or (POLICIES[method],)
    names = [one.name for kind in kinds for one in fields(kind) if one.init]
    return [name for name in names if name not in _UNSERVABLE]


@dataclass(frozen=True)
class WithSpans(Policy):
    """What a method keeps of a prompt, of some spans of which the request says what stays.

    The library does the same with ``protect`` over all spans that the request names, a budget with
    room for what they lose, and `CompressedCache.drop` of that after the prompt.

    Attributes:
        policy: has room for all that the spans name; None keeps all that these do not drop.
        spans: lie in the prompt, see `RequestSpans.require_within`.
        of_spans: for every span that is compressed a method with room for all that is outside it,
            and for what stays of it.
    """

    name: ClassVar[str] = "with-spans"

    policy: Policy | None
    spans: RequestSpans
    span_policies: tuple[Policy, ...] = ()

    def __post_init__(self) -> None:
        if self.policy is None:
            return
        self.policy.require_protection(self.spans.all_spans)
        scores, named = scoring_policy(self.policy), self.spans.all_spans
        room, first = (
            count_kept_tokens(scores, MOST) - count_window_tokens(scores),
            count_sink_tokens(scores),
        )
        if named.tokens + first - named.among_first(first) > room:
            got = named.tokens
            raise InvalidArgumentError(f"protect: expected at most {room:,} tokens, got {got:,}")

    @property
    def _methods(self) -> list[Policy]:
        return [one for one in (self.policy, *self.span_policies) if one is not None]

    @property
    def query_tokens(self) -> int:
        return max((one.query_tokens for one in self._methods), default=0)

    @property
    def window_tokens(self) -> int:
        """See the function of this name."""
        return max(map(count_window_tokens, self._methods), default=0)

    @property
    def per_head_budget(self) -> bool:  # type: ignore[override] # of the method around which it is
        """Whether the method's heads keep different numbers of tokens."""
        return self.policy is not None and self.policy.per_head_budget

    def count_kept_tokens(self, prompt_tokens: int) -> int:
        """Tokens that every layer keeps of a prompt, per KV head; the mean where heads differ."""
        chosen = (
            prompt_tokens if self.policy is None else count_kept_tokens(self.policy, prompt_tokens)
        )
        return chosen - self.spans.dropped_tokens_of_spans

    def select(self, layer: PromptLayer) -> Selection:
        """Of a prompt of which nothing was dropped before."""
        return self.select_with_positions(layer, _slots(layer))

    def select_with_positions(self, layer: PromptLayer, positions: Tensor) -> Selection:
        """Where (rows, 1 or H, S) positions say which tokens the slots of a head hold."""
        named, lost = self.protect_spans(layer, positions)
        kept = torch.ones_like(lost) if self.policy is None else _kept(self.policy, named)
        return Selection.of_mask(kept & ~lost, per_head_budget=self.per_head_budget)

    def protect_spans(
        self, layer: PromptLayer, positions: Tensor | None = None
    ) -> tuple[PromptLayer, Tensor]:
        """A layer in which all that the spans name is protected, and (rows, 1 or H, S) what goes.

        Positions are those of `select_at`, by default those of a prompt that is whole.
        """
        positions = _slots(layer) if positions is None else positions
        lost = self.spans.drop.cover(positions)
        for (span, _), policy in zip(self.spans.compress, self.span_policies, strict=True):
            outside = ~Spans((span,)).cover(positions)
            lost = lost | ~_kept(policy, replace(layer, protected=outside))
        return replace(layer, protected=self.spans.all_spans.cover(positions)), lost


def _slots(layer: PromptLayer) -> Tensor:
    """The slots of a layer, which every head has: (rows, 1, S) int64."""
    slots = torch.arange(layer.keys.shape[2], device=layer.keys.device)
    return slots.expand(layer.keys.shape[0], 1, -1)


def _kept(policy: Policy, layer: PromptLayer) -> Tensor:
    """What a method keeps of a layer, as a mask: (rows, H or 1, S) bool."""
    selection, slots = policy.select(layer), layer.keys.shape[2]
    if selection is None:
        shape = layer.keys.shape[0], 1, slots
        return torch.ones(shape, dtype=torch.bool, device=layer.keys.device)
    keep = selection.keep_indices
    mask = torch.zeros(*keep.shape[:2], slots + 1, dtype=torch.bool, device=keep.device)
    return mask.scatter(2, keep.where(keep >= 0, slots), True)[..., :slots]


def count_sink_tokens(policy: Policy) -> int:
    """How many first tokens a method keeps whatever their votes: attention sinks."""
    tokens: int = getattr(policy, "sink_tokens", getattr(policy, "start", 0))
    return tokens


def count_window_tokens(policy: Policy) -> int:
    """How many last tokens a method keeps whatever their votes: its window."""
    scores = scoring_policy(policy)
    tokens: int = getattr(scores, "window_size", scores.query_tokens)
    return tokens


def scoring_policy(policy: Policy) -> Policy:
    """The method that scores, inside those around it."""
    return policy.policy if isinstance(policy, AdaKV | AcrossLayers) else policy


def count_kept_tokens(policy: Policy, prompt_tokens: int) -> int:
    """Tokens that every layer keeps of a prompt, per KV head; the mean where heads differ."""
    if isinstance(policy, WithSpans):
        return policy.count_kept_tokens(prompt_tokens)
    budget: int = getattr(scoring_policy(policy), "budget", prompt_tokens)
    return min(budget, prompt_tokens)


def require_spans_fit(policy: Policy | None, prompt_tokens: int) -> None:
    """Raise InvalidArgumentError where a request names spans that its prompt does not have."""
    if isinstance(policy, WithSpans):
        policy.spans.require_fit(prompt_tokens, policy.window_tokens)


def require_can_protect_first(policy: Policy, tokens: int) -> None:
    """Raise InvalidArgumentError unless a method keeps the first tokens, and has room for them."""
    try:
        if tokens:
            policy.require_protection(Spans(((0, tokens),)))
    except InvalidArgumentError as error:  # it says `protect`, as the library calls it
        raise InvalidArgumentError(f"{PROTECT_FIRST}{str(error).removeprefix('protect')}") from None
