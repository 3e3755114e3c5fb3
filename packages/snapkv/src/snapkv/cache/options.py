"""Words of what a user says of a cache: how later prompts choose, and what of a text must stay."""

from collections.abc import Iterable
from typing import Literal

from snapkv.policies.spans import Span, Spans

Turns = Literal["append", "compress", "recall"]
"""What becomes of a later prompt: stored whole behind what was kept; its end votes on what was
kept; or it votes on all that was seen."""

Protect = Iterable[Span]
"""Half-open spans of positions; see `CompressedCache`."""


def protected_spans(protect: Protect | None) -> Spans | None:
    """What a user protects; None for nothing."""
    spans = None if protect is None else Spans.of("protect", protect)
    return spans if spans is not None and spans.parts else None
