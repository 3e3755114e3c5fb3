"""The methods that a server offers, and the number of tokens that each of them keeps."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from snapkv.errors import InvalidArgumentError, wrong
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


def _default(**parameters: Any) -> SnapKV:
    return SnapKV(**default_parameters(parameters))


METHODS: dict[str, Callable[..., Policy]] = {
    DEFAULT: _default,
    SnapKV.name: SnapKV,
    StreamingLLM.name: StreamingLLM,
    TOVA.name: TOVA,
    AdaKV.name: _adakv,
    AcrossLayers.name: default_policy,
}
"""The methods for which the number of kept tokens of a layer is known before the votes."""

_UNSERVABLE = {"budget", "keep_ratio", "recent", "policy"}


def parameter_names(method: str) -> list[str]:
    """Return the names of the parameters that a method has on a server, in order: all of its
    parameters except its budget.

    If the method wraps another one that computes the scores, the parameters of that one are
    included.

    Args:
        method: a key of `METHODS`.
    """
    around = {DEFAULT: (SnapKV,), AdaKV.name: (SnapKV, AdaKV), AcrossLayers.name: (SnapKV,)}
    sources = around.get(method) or (POLICIES[method],)
    names = [one.name for source in sources for one in fields(source) if one.init]
    return [name for name in names if name not in _UNSERVABLE]


@dataclass(frozen=True)
class WithSpans(Policy):
    """A method of compression, together with the spans of the prompt that a request drops, protects
    or compresses.

    The library has the same result with ``protect`` over all of these spans, a budget that also
    counts the tokens that they drop, and a call of `CompressedCache.drop` after the prompt.

    Attributes:
        policy: the method, whose budget includes all tokens of the spans; None keeps all tokens
            that the spans do not drop.
        spans: the edits, which must lie in the prompt; see `RequestSpans.require_fit`.
        span_policies: for every span that is compressed, in their order, a method whose budget is
            all tokens outside the span and those that stay of it.

    Raises:
        InvalidArgumentError: `policy` cannot protect tokens, or the spans do not fit into its
            budget.
    """

    name: ClassVar[str] = "with-spans"

    policy: Policy | None
    spans: RequestSpans
    span_policies: tuple[Policy, ...] = ()

    def __post_init__(self) -> None:
        """Check that the budget of the method is large enough for all spans.

        Raises:
            InvalidArgumentError: the method cannot protect tokens, or the spans do not fit into its
                budget.
        """
        if self.policy is None:
            return
        self.policy.require_protection(self.spans.all_spans)
        scores, named = scoring_policy(self.policy), self.spans.all_spans
        available = count_kept_tokens(scores, MOST) - count_window_tokens(scores)
        first = count_sink_tokens(scores)
        if named.tokens + first - named.among_first(first) > available:
            problem = (
                f"at most {available:,} tokens can be protected, but got {named.tokens:,} tokens"
            )
            raise wrong("protect", problem, "Protect fewer tokens")

    @property
    def _methods(self) -> list[Policy]:
        return [one for one in (self.policy, *self.span_policies) if one is not None]

    @property
    def query_tokens(self) -> int:
        """The number of queries that are needed, which is the largest number that one of the
        methods needs; 0 if tokens are only dropped or protected.
        """
        return max((one.query_tokens for one in self._methods), default=0)

    @property
    def window_tokens(self) -> int:
        """The length of the longest observation window of the methods, see `count_window_tokens`; 0
        if tokens are only dropped or protected.
        """
        return max(map(count_window_tokens, self._methods), default=0)

    @property
    def per_head_budget(self) -> bool:  # type: ignore[override] # depends on the instance
        """Whether the heads of a layer may keep different numbers of tokens."""
        return self.policy is not None and self.policy.per_head_budget

    def count_kept_tokens(self, prompt_tokens: int) -> int:
        """Return how many tokens of a prompt each KV head keeps on average, without the tokens that
        the spans drop.
        """
        chosen = count_kept_tokens(self.policy, prompt_tokens) if self.policy else prompt_tokens
        return chosen - self.spans.dropped_tokens

    def select(self, layer: PromptLayer) -> Selection:
        """Select the tokens that are kept of a prompt, if no tokens of the prompt were dropped
        before, so that slots are positions.

        Returns:
            A selection of slots of `layer`. It is never None, even if all slots are kept.
        """
        return self.select_with_positions(layer, _slot_positions(layer))

    def select_with_positions(self, layer: PromptLayer, positions: Tensor) -> Selection:
        """Select the tokens that are kept of a prompt, if some of its tokens may have been dropped
        before.

        Args:
            layer: the stored tokens.
            positions: (rows, 1 or H, S) int64, the position in the prompt of the token in each of
                the S slots.

        Returns:
            A selection of slots of `layer`. It is never None, even if all slots are kept.
        """
        named, lost = self.protect_spans(layer, positions)
        kept = torch.ones_like(lost) if self.policy is None else _kept_mask(self.policy, named)
        return Selection.of_mask(kept & ~lost, per_head_budget=self.per_head_budget)

    def protect_spans(
        self, layer: PromptLayer, positions: Tensor | None = None
    ) -> tuple[PromptLayer, Tensor]:
        """Protect the tokens of all spans, and find out which of these tokens are dropped.

        Args:
            layer: the stored tokens. It is not changed; tokens that it protects already are not
                protected in the result unless a span contains them.
            positions: (rows, 1 or H, S) int64, the position of the token in each slot; by default
                slots are positions.

        Returns:
            A copy of the layer in which all tokens of the spans are protected, and (rows, 1 or H,
            S) bool, True for each token that is dropped.
        """
        positions = _slot_positions(layer) if positions is None else positions
        lost = self.spans.drop.cover(positions)
        for (span, _), policy in zip(self.spans.compress, self.span_policies, strict=True):
            outside = ~Spans((span,)).cover(positions)
            lost = lost | ~_kept_mask(policy, replace(layer, protected=outside))
        return replace(layer, protected=self.spans.all_spans.cover(positions)), lost


def _slot_positions(layer: PromptLayer) -> Tensor:
    """Return the position of the token in each slot, for a layer from which no tokens were dropped.

    Returns:
        An int64 tensor of shape (rows, 1, S).
    """
    slots = torch.arange(layer.keys.shape[2], device=layer.keys.device)
    return slots.expand(layer.keys.shape[0], 1, -1)


def _kept_mask(policy: Policy, layer: PromptLayer) -> Tensor:
    """Return a mask that marks the slots whose tokens the method keeps.

    Returns:
        A Boolean tensor of shape (rows, H or 1, S), for the rows and the S slots of `layer`; True
        for a kept token. With a second size of 1, all heads keep the same tokens. If `select` of
        the method returns None, every token is kept.
    """
    selection, slots = policy.select(layer), layer.keys.shape[2]
    if selection is None:
        shape = layer.keys.shape[0], 1, slots
        return torch.ones(shape, dtype=torch.bool, device=layer.keys.device)
    keep = selection.keep_indices
    mask = torch.zeros(*keep.shape[:2], slots + 1, dtype=torch.bool, device=keep.device)
    return mask.scatter(2, keep.where(keep >= 0, slots), True)[..., :slots]


def count_sink_tokens(policy: Policy) -> int:
    """Return how many tokens at the beginning are always kept by the method, as its attention
    sinks; 0 if it has none. A method that is wrapped around another one has none here.
    """
    tokens: int = getattr(policy, "sink_tokens", getattr(policy, "start", 0))
    return tokens


def count_window_tokens(policy: Policy) -> int:
    """Return how many tokens at the end are always kept by the method, as its observation window. A
    method without a window has the number of queries that it needs.
    """
    scores = scoring_policy(policy)
    tokens: int = getattr(scores, "window_size", scores.query_tokens)
    return tokens


def scoring_policy(policy: Policy) -> Policy:
    """Return the method that computes the scores, without an `AdaKV` or `AcrossLayers` that is
    wrapped around it. Any other method is returned unchanged.
    """
    return policy.policy if isinstance(policy, AdaKV | AcrossLayers) else policy


def count_kept_tokens(policy: Policy, prompt_tokens: int) -> int:
    """Return how many tokens of a prompt each KV head keeps on average, without the tokens that
    spans drop: the budget, or all tokens if there are fewer or the method has no budget.
    """
    if isinstance(policy, WithSpans):
        return policy.count_kept_tokens(prompt_tokens)
    budget: int = getattr(scoring_policy(policy), "budget", prompt_tokens)
    return min(budget, prompt_tokens)


def require_spans_fit(policy: Policy | None, prompt_tokens: int) -> None:
    """Check that all spans of a request lie inside its prompt.

    Args:
        policy: the method of the request; None and a method without spans are always accepted.
        prompt_tokens: the length of the prompt.

    Raises:
        RefusedError: a span ends after the prompt, or contains tokens that cannot be dropped or
            compressed.
    """
    if isinstance(policy, WithSpans):
        policy.spans.require_fit(prompt_tokens, policy.window_tokens)


def require_can_protect_first(policy: Policy, tokens: int) -> None:
    """Check that the method can protect the first `tokens` tokens of a prompt. 0 tokens are always
    accepted.

    Raises:
        InvalidArgumentError: the method cannot protect tokens, or has too small a budget for them.
    """
    try:
        if tokens:
            policy.require_protection(Spans(((0, tokens),)))
    except InvalidArgumentError as error:  # the library calls this argument `protect`
        raise InvalidArgumentError(f"{PROTECT_FIRST}{str(error).removeprefix('protect')}") from None
