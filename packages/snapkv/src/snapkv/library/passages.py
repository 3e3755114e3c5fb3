"""Cutting a text into passages that overlap, by places in the text."""

import re

PASSAGE_WORDS = 200
OVERLAP_WORDS = 50

Span = tuple[int, int]
"""Half-open, in characters."""


def passages(text: str) -> list[Span]:
    """Where passages of 200 words stand; each begins with the last 50 words of the one before.

    Together they hold every word. The last one is shorter; a text without words has none.
    """
    words = [found.span() for found in re.finditer(r"\S+", text)]
    spans = []
    for first in range(0, len(words), PASSAGE_WORDS - OVERLAP_WORDS):
        last = min(first + PASSAGE_WORDS, len(words)) - 1
        spans.append((words[first][0], words[last][1]))
        if last == len(words) - 1:
            break
    return spans


def lines_of(text: str, span: Span) -> Span:
    """The first and the last line that a span touches, counted from 1."""
    start, stop = span
    first = text.count("\n", 0, start) + 1
    return first, first + text.count("\n", start, stop)
