"""Sentences about what a cache kept and about its answer, and the differences of two answers."""

import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Literal

from snapkv.validation import format_bytes

Change = tuple[Literal["same", "gone", "new"], str]
"""A run of words that is in both answers, only in the first, or only in the second."""

MOST_WORDS = 500
"""The most words of each text, after the common beginning, that are compared word by word, because
the time can grow with the cube of the length."""


def kept_sentence(kept: float, tokens: int, later: float, held_bytes: int, full_bytes: int) -> str:
    """Return a sentence that says how much of a prompt a cache keeps, in tokens and in bytes.

    Args:
        kept: how many prompt tokens a head keeps, on average over all heads and layers.
        tokens: how many tokens the prompt has.
        later: how many tokens after the prompt the cache also holds.
        held_bytes: the number of bytes of the cache.
        full_bytes: the number of bytes of the full cache after the same tokens.
    """
    behind = f", and {later:,.0f} later ones" if later else ""
    return (
        f"The cache keeps {kept:,.0f} of {tokens:,} prompt tokens per head on average{behind}: "
        f"{format_bytes(held_bytes)} instead of {format_bytes(full_bytes)} "
        f"({_percent(held_bytes / full_bytes)})."
    )


def answer_sentence(same: bool, cut_after: int | None) -> str:
    """Return a sentence that says whether an answer is the same as that of the full cache.

    Args:
        same: whether both answers are the same.
        cut_after: the number of tokens after which both answers were cut off; None if they were
            not.
    """
    if not same:
        return "Its answer differs from the full cache's."
    far = "" if cut_after is None else f", as far as both go: {cut_after:,} tokens"
    return f"Its answer is the same as the full cache's{far}."


def _percent(share: float) -> str:
    """Format a share as a percentage that says 0% or 100% only if this is exact."""
    if 0 < share < 0.1:
        return f"{max(share, 0.001):.1%}"
    return f"{share:.0%}" if share in (0, 1) else f"{min(max(share, 0.1), 0.99):.0%}"


def word_changes(before: str, after: str) -> list[Change]:
    """Compare two texts word by word, and return the runs of words that are the same or differ.

    The runs without those called "new" add up to the first text, and the runs without those called
    "gone" to the second. If the rest after the first difference has more than `MOST_WORDS` words,
    it is one change.
    """
    ours, theirs = (re.findall(r"\s*\S+|\s+\Z", text) for text in (before, after))
    pairs = enumerate(zip_longest(ours, theirs))
    alike = next((place for place, (one, other) in pairs if one != other), len(ours))
    left = ours[alike:], theirs[alike:]
    if max(map(len, left)) <= MOST_WORDS:
        changes = list(_changed_runs(*left))
    else:
        changes = [("gone", "".join(left[0])), ("new", "".join(left[1]))]
    return [run for run in [("same", "".join(ours[:alike])), *changes] if run[1]]


def _changed_runs(ours: list[str], theirs: list[str]) -> Iterator[Change]:
    matcher = SequenceMatcher(None, ours, theirs, autojunk=False)
    for what, first, last, new_first, new_last in matcher.get_opcodes():
        if what == "equal":
            yield "same", "".join(ours[first:last])
            continue
        if gone := "".join(ours[first:last]):
            yield "gone", gone
        if new := "".join(theirs[new_first:new_last]):
            yield "new", new
