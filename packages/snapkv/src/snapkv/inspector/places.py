"""Where in its document a part of a prompt stands, in words: a section, or else a line."""

import bisect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import PurePath

from snapkv.app.text_files import TextFile

_PROSE = {"", ".md", ".markdown", ".txt", ".rst", ".html", ".htm", ".xhtml", ".pdf"}
"""Files in which a line such as "# Scope" is a heading and no comment."""

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
    """A document in the text of a prompt: where it begins and ends, in characters."""

    name: str
    start: int
    stop: int
    line_starts: list[int]
    headings: list[tuple[int, str]]

    def place(self, character: int, named: bool) -> str:
        """The last heading before a character; without one, its line and how far in it stands."""
        before = [title for at, title in self.headings if at <= character]
        if before:
            return f"{before[-1]} of {self.name}" if named else before[-1]
        share = (character - self.start) / max(1, self.stop - self.start)
        line = bisect.bisect_right(self.line_starts, character)
        where = f"line {line:,}, " if len(self.line_starts) > 1 else ""
        return f"{where}{share:.0%} into {self.name}"


class Places:
    """The places of a prompt.

    Args:
        pieces: the text of every token.
        documents: what the prompt holds, in its order; a document that a chat template has
            rewritten is not found, and what stands in it gets a share of the prompt.
    """

    def __init__(self, pieces: Sequence[str], documents: Sequence[TextFile]) -> None:
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

    def of(self, start: int, stop: int) -> str:
        """Where the tokens from `start` to before `stop` stand: the place of their middle."""
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
    """What a line is called as a heading; empty where it is none, or no paragraph may begin."""
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
    """What a numbered section is called; empty where the line begins with no number of one."""
    if found := _NAMED.match(line):
        return _numbered(found["number"], found["title"])
    if found := _NUMBERED.fullmatch(line):
        return _numbered(f"§ {found['number']}", found["title"])
    return ""


def _numbered(number: str, title: str) -> str:
    """A section by its number, and by its title where it has a short one."""
    short = title.strip(" \t.:-\u2013\u2014")
    if not short or len(short) > _LONGEST_TITLE or re.search(r"[.;:!?]", short):
        return number
    return f"{number} {_quoted(short)}"


def _quoted(title: str) -> str:
    short = title if len(title) <= _LONGEST_TITLE else f"{title[:_LONGEST_TITLE].rstrip()}…"
    return f"“{short}”"


def _placed(document: TextFile, start: int) -> _Placed:
    text = document.text
    lengths = (len(line) + 1 for line in text.split("\n")[:-1])
    return _Placed(
        name=document.name,
        start=start,
        stop=start + len(text),
        line_starts=list(accumulate(lengths, initial=start)),
        headings=[(start + at, title) for at, title in headings(document.name, text)],
    )
