"""Which tokens of a conversation a cache must keep, and which parts share its budget."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from snapkv.cache.identity import SpanRule
from snapkv.cache.layer import CompressedLayer
from snapkv.errors import InvalidArgumentError
from snapkv.policies import Policy
from snapkv.policies.fair import Segments
from snapkv.policies.spans import Span, Spans

Protect = Iterable[Span]
"""Half-open spans of positions; see `CompressedCache`."""

Fair = Mapping[str, Span]
"""Half-open spans of positions by name; see `CompressedCache`."""


def span_rule(protect: Protect | None, fair: Fair | None) -> SpanRule:
    """The rule that a user has given; where it is empty, nothing.

    Raises:
        InvalidArgumentError: an empty span, or segments that overlap.
        InvalidTypeError: a value of the wrong type.
    """
    spans = Spans(()) if protect is None else Spans.of("protect", protect)
    segments = Segments(()) if fair is None else Segments.of("fair", fair)
    return SpanRule(
        protect=spans if spans.parts else None, fair=segments if segments.parts else None
    )


def described(rule: SpanRule) -> dict[str, Any]:
    """What `span_rule` takes, ready for JSON."""
    spans = None if rule.protect is None else [list(span) for span in rule.protect.parts]
    segments = None if rule.fair is None else {name: list(span) for name, span in rule.fair.parts}
    return {"protect": spans, "fair": segments}


def apply(rule: SpanRule, layers: Sequence[CompressedLayer], policy: Policy) -> None:
    """Prepare the compressed layers of a cache, which know by now how later prompts choose.

    Raises:
        InvalidArgumentError: the policy does not go with the rule, or has no room.
    """
    if rule.protect is not None:
        policy.require_protection(rule.protect)
    if rule.fair is not None:
        policy.require_fairness(rule.fair)
        if any(layer.turns is not None and layer.offloaded is None for layer in layers):
            raise InvalidArgumentError(
                "fair: expected a cache that chooses out of whole prompts, got turns='compress' "
                "without recall, whose later turns find only a part of each segment; pass "
                "recall='host', or leave one out"
            )
    for layer in layers:
        layer.spans = rule


def protected_slots(layer: CompressedLayer, slots: int, pads: Tensor | None) -> Tensor | None:
    """Which of a layer's first slots hold tokens that must stay.

    Args:
        layer: of a prompt or turn that ends.
        slots: how many.
        pads: (B,) leading pads of each row of a first prompt, or None; the layer knows later ones.

    Returns:
        (B, 1 or H, slots) bool; None where nothing is protected.
    """
    spans = layer.spans.protect
    if spans is None:
        return None
    if layer.slots.kept is not None:
        return spans.cover(layer.slots.positions(layer.store)[..., :slots])
    positions = torch.arange(slots, device=layer.store.keys.device).expand(len(layer.keys), 1, -1)
    return spans.cover(positions if pads is None else positions - pads[:, None, None])
