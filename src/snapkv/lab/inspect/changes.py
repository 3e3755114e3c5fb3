"""What an answer says that another does not, word by word."""

import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Literal

Change = tuple[Literal["same", "gone", "new"], str]
"""A run of words that both answers have, that only the first has, or that only the second has."""


def word_changes(before: str, after: str) -> list[Change]:
    """How one text becomes the other; what is not "new" makes the first, not "gone" the second."""
    return list(_changes(before, after))


def _changes(before: str, after: str) -> Iterator[Change]:
    ours, theirs = (re.findall(r"\s*\S+|\s+\Z", text) for text in (before, after))
    matcher = SequenceMatcher(None, ours, theirs, autojunk=False)
    for what, first, last, new_first, new_last in matcher.get_opcodes():
        if what == "equal":
            yield "same", "".join(ours[first:last])
            continue
        if gone := "".join(ours[first:last]):
            yield "gone", gone
        if new := "".join(theirs[new_first:new_last]):
            yield "new", new
