"""An inspection in words: where parts are, how much of them was kept, how answers differ."""

import bisect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import accumulate, zip_longest
from pathlib import PurePath
from typing import Literal

from snapkv.inspector.leave_out import Span
from snapkv.inspector.scores import KeptOf
from snapkv.library.records import Text

Change = tuple[Literal["same", "gone", "new"], str]
"""A run of words in both answers, only in the first, or only in the second."""

MOST_WORDS = 500
"""Limit per text, after the common beginning, for a comparison word by word: its time can grow with
the cube of the length."""

_NAMED_PLACES = 2

_PROSE = {"", ".md", ".markdown", ".txt", ".rst", ".html", ".htm", ".xhtml", ".pdf"}
"""Files in which a line such as "# Scope" is a heading, not a comment."""

_MARKDOWN = re.compile(r"#{1,6}[ \t]+")
_CLOSING = re.compile(r"(?:^|[ \t])#+$")
_UNDERLINE = re.compile(r"(=|-|~|\^)\1{2,}[ \t]*")
_NAMED = re.compile(
    r"(?P<number>(?:§+[ \t]*|(?:Section|Article|Clause|Chapter)[ \t]+)\d{1,3}(?:\.\d{1,3})*)"
    r"(?:[.:)]|\b)[ \t]*(?P<title>.*)"
)
_NUMBERED = re.compile(r"(?P<number>\d{1,3}(?:\.\d{1,3})+)\.?[ \t]+(?P<title>[^\W\d_a-z].*)")
_LONGEST_TITLE = 60
_LONGEST_HEADING = 300
_FENCE = "```"


@dataclass(frozen=True, kw_only=True)
class _Placed:
    """A document in the text of a prompt, with its first and last character."""

    name: str
    start: int
    stop: int
    line_starts: list[int]
    headings: list[tuple[int, str]]

    def place(self, character: int, named: bool) -> str:
        """The last heading before a character; without headings, its line and share of the text."""
        before = [title for at, title in self.headings if at <= character]
        if before:
            return f"{before[-1]} of {self.name}" if named else before[-1]
        share = (character - self.start) / max(1, self.stop - self.start)
        line = bisect.bisect_right(self.line_starts, character)
        where = f"line {line:,}, " if len(self.line_starts) > 1 else ""
        return f"{where}{share:.0%} into {self.name}"


class Places:
    """Places in a prompt; in a document that is not found, a share of the prompt."""

    def __init__(self, pieces: Sequence[str], documents: Sequence[Text]) -> None:
        text = "".join(pieces)
        self._starts = list(accumulate(map(len, pieces), initial=0))
        self._several = len(documents) > 1
        self._documents: list[_Placed] = []
        self._complete = bool(documents)
        reached = 0
        for document in documents:
            start = text.find(document.text, reached)
            if start < 0:
                self._complete = False
                continue
            reached = start + len(document.text)
            self._documents.append(_placed(document, start))

    def place_name(self, start: int, stop: int) -> str:
        """The place of the middle of the tokens from `start` to before `stop`."""
        character = (self._starts[start] + self._starts[stop]) // 2
        for document in self._documents:
            if document.start <= character < document.stop:
                return document.place(character, self._several)
        if self._complete and character < self._documents[0].start:
            return "the beginning of the prompt"
        if self._complete and character >= self._documents[-1].stop:
            return "the question"
        return f"the text {character / max(1, self._starts[-1]):.0%} into the prompt"


def headings(name: str, text: str) -> Iterator[tuple[int, str]]:
    """The headings of a document, each with the character at which it begins.

    A heading is a line of Markdown that begins with #, a line that is underlined, or a numbered
    section ("§ 9.11", "Section 4", "9.11 Scope") at the beginning of a paragraph. Source code has
    none.
    """
    if PurePath(name).suffix.lower() not in _PROSE:
        return
    lines = text.split("\n")
    starts = accumulate((len(line) + 1 for line in lines), initial=0)
    is_code, may_begin = False, True
    for line, below, start in zip(map(str.strip, lines), [*lines[1:], ""], starts, strict=False):
        is_code ^= line.startswith(_FENCE)
        title = "" if is_code else _title(line, below, may_begin)
        if title:
            yield start, title
        ends = not line or line[-1] in ".;:!?" or _UNDERLINE.fullmatch(line) is not None
        may_begin = bool(title) or ends


def _title(line: str, below: str, may_begin: bool) -> str:
    """The name of a heading line; empty if it is none or inside a paragraph."""
    if len(line) > _LONGEST_HEADING:
        return ""
    if found := _MARKDOWN.match(line):
        title = _CLOSING.sub("", line[found.end() :]).rstrip()
        return _section(title) or (_quoted(title) if title else "")
    if not may_begin:
        return ""
    if section := _section(line):
        return section
    if line and not _UNDERLINE.fullmatch(line) and _UNDERLINE.fullmatch(below):
        return _quoted(line)
    return ""


def _section(line: str) -> str:
    """The name of a numbered section; empty if the line has no section number."""
    if found := _NAMED.match(line):
        return _numbered(found["number"], found["title"])
    if found := _NUMBERED.fullmatch(line):
        return _numbered(f"§ {found['number']}", found["title"])
    return ""


def _numbered(number: str, title: str) -> str:
    """A section's number, and its title if short."""
    short = title.strip(" \t.:-\u2013\u2014")
    if not short or len(short) > _LONGEST_TITLE or re.search(r"[.;:!?]", short):
        return number
    return f"{number} {_quoted(short)}"


def _quoted(title: str) -> str:
    short = title if len(title) <= _LONGEST_TITLE else f"{title[:_LONGEST_TITLE].rstrip()}…"
    return f"“{short}”"


def _placed(document: Text, start: int) -> _Placed:
    text = document.text
    lengths = (len(line) + 1 for line in text.split("\n")[:-1])
    return _Placed(
        name=document.name,
        start=start,
        stop=start + len(text),
        line_starts=list(accumulate(lengths, initial=start)),
        headings=[(start + at, title) for at, title in headings(document.name, text)],
    )


def sentence(spans: Sequence[Span], places: Sequence[str], kept: KeptOf | None, held: float) -> str:
    """What the answer needs, and how much was kept; `held`: share of the full cache's bytes."""
    share = _percent(held)
    if not spans:
        return f"What the answer needs was not measured; the answer used {share} of the cache."
    if kept is None:
        return (
            "Masking any single part of the prompt leaves the answer unchanged; "
            f"the answer used {share} of the cache."
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
    """A share in percent; 0% and 100% only if exact."""
    if 0 < share < 0.1:
        return f"{max(share, 0.001):.1%}"
    return f"{share:.0%}" if share in (0, 1) else f"{min(max(share, 0.1), 0.99):.0%}"


def word_changes(before: str, after: str) -> list[Change]:
    """How one text becomes the other: all runs but "new" are the first, all but "gone" the second.

    If both differ in too many words, everything after the first difference is one change.
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
