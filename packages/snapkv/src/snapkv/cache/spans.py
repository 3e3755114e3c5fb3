"""Which tokens of a conversation a cache must keep, and which parts share its budget."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from snapkv.cache.layer import CompressedLayer, SpanRule
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
