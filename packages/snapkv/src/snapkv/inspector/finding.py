"""The inspection in a sentence: what the answer needs, and how much of it was kept."""

from collections.abc import Sequence
from dataclasses import replace

from snapkv.inspector.leave_out import Span
from snapkv.inspector.seen import KeptOf

_NAMED_PLACES = 2


def needed_spans(spans: Sequence[Span]) -> list[Span]:
    """The parts that change the answer, neighbours as one, the most missed first.

    Args:
        spans: from the first to the last, none over another.
    """
    found: list[Span] = []
    for span in spans:
        if not span.changed:
            continue
        if found and found[-1].stop == span.start:
            before = found.pop()
            span = replace(span, start=before.start, loss=max(before.loss, span.loss))
        found.append(span)
    return sorted(found, key=lambda span: -span.loss)


def sentence(spans: Sequence[Span], places: Sequence[str], kept: KeptOf | None, held: float) -> str:
    """One sentence in plain words.

    Args:
        spans: all parts that were hidden from the answer; none where none was.
        places: where the parts stand that the answer needs, the most missed first.
        kept: how much of them was kept; None without any.
        held: the share of the full cache's bytes.
    """
    share = _percent(held)
    if not spans:
        return f"What the answer needs was not looked at; it was given from {share} of the cache."
    if kept is None:
        return (
            "No part of the prompt changes the answer where it alone is hidden; "
            f"it was given from {share} of the cache."
        )
    return (
        f"The answer needs {_listed(places)}; {_amount(kept.share)} kept, in {share} of the cache."
    )


def _listed(places: Sequence[str]) -> str:
    names = list(dict.fromkeys(places))
    more = len(names) - _NAMED_PLACES
    if more > 0:
        names = [*names[:_NAMED_PLACES], f"{more:,} more {'places' if more > 1 else 'place'}"]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _amount(share: float) -> str:
    if share >= 1:
        return "all of it was"
    return f"{_percent(share)} of it was" if share > 0 else "none of it was"


def _percent(share: float) -> str:
    """A share that is not all or nothing never reads as if it were."""
    if 0 < share < 0.1:
        return f"{max(share, 0.001):.1%}"
    return f"{share:.0%}" if share in (0, 1) else f"{min(max(share, 0.1), 0.99):.0%}"
