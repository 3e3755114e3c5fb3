"""What an answer says that another does not, word by word."""

import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Literal

Change = tuple[Literal["same", "gone", "new"], str]
"""A run of words that both answers have, that only the first has, or that only the second has."""


MOST_WORDS = 500
"""Of each text, behind the words that both begin with, that are compared word by word: the time for
that can grow with their cube."""


def word_changes(before: str, after: str) -> list[Change]:
    """How one text becomes the other; what is not "new" makes the first, not "gone" the second.

    Where both differ early in many words, all behind that place is one change.
    """
    ours, theirs = (re.findall(r"\s*\S+|\s+\Z", text) for text in (before, after))
    pairs = enumerate(zip_longest(ours, theirs))
    alike = next((place for place, (one, other) in pairs if one != other), len(ours))
    left = ours[alike:], theirs[alike:]
    if max(map(len, left)) <= MOST_WORDS:
        changes = list(_changes(*left))
    else:
        changes = [("gone", "".join(left[0])), ("new", "".join(left[1]))]
    return [run for run in [("same", "".join(ours[:alike])), *changes] if run[1]]


def _changes(ours: list[str], theirs: list[str]) -> Iterator[Change]:
    matcher = SequenceMatcher(None, ours, theirs, autojunk=False)
    for what, first, last, new_first, new_last in matcher.get_opcodes():
        if what == "equal":
            yield "same", "".join(ours[first:last])
            continue
        if gone := "".join(ours[first:last]):
            yield "gone", gone
        if new := "".join(theirs[new_first:new_last]):
            yield "new", new
