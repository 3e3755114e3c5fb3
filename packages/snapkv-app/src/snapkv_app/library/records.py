"""The texts of a library: as they are given, and with what is known of them once they are read."""

import os
import re
import stat
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self, get_type_hints

from snapkv.cache.saving.records import digest_of, from_record, record_of
from snapkv.errors import InvalidArgumentError, InvalidTypeError, LibraryError

PASSAGE_WORDS = 200
OVERLAP_WORDS = 50
_KEY_DIGITS = 24

WITHOUT_SPACES = (
    "\u2e80-\u2fdf\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
"""Characters of Chinese, Japanese and Korean, each of which counts as a word, for a pattern."""

_WORD = re.compile(f"[{WITHOUT_SPACES}]|[^\\s{WITHOUT_SPACES}]+")

Span = tuple[int, int]
"""Half-open, in characters."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text that a library is given.

    Attributes:
        name: what answers call it.
        text: all of it; not empty.
        source: the file it comes from, as an absolute path; None for a text that was given. Adding
            the same source again, or without one the same name, replaces the document.
        stamp: the `file_stamp` of that file when the text was read; empty if it is unknown.
    """

    name: str
    text: str
    source: str | None = None
    stamp: str = ""

    def __post_init__(self) -> None:
        for argument in ("name", "text"):
            value = getattr(self, argument)
            if not isinstance(value, str):
                raise InvalidTypeError(
                    f"{argument}: expected a text, got {type(value).__name__}; pass a str"
                )
            if not value.strip():
                raise InvalidArgumentError(
                    f"{argument}: expected a text, got an empty one in {self.name!r}; leave the "
                    "document out"
                )
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise InvalidArgumentError(
                    f"{argument}: expected Unicode text, got {value[error.start]!r}, half of a "
                    f"character, in {self.name!r}; decode it with errors='replace'"
                ) from error

    @property
    def key(self) -> str:
        """What files of this document are named by."""
        told = f"text\0{self.name}" if self.source is None else f"file\0{self.source}"
        return digest_of(told)[:_KEY_DIGITS]


@dataclass(frozen=True, kw_only=True)
class Record(Text):
    """A document of a library: a text that was read, and the file with what is kept of it.

    `About` says who read it, and how. The file holds its token ids with keys and values: `Reader`
    makes a `Part` of them, which other parts can join, and `stored` what an engine puts into its
    blocks. There it is `CachedPrefix` of `snapkv_vllm`, which everybody may use who may name it.
    """

    size: int  # bytes of the text in UTF-8
    sha256: str  # of them
    chunks: tuple[Span, ...]  # its passages for retrieval
    tokens: int  # that the model has read, the library's prefix not counted
    bytes: int  # of the file with its cache
    cache: str  # the name of that file
    seal: str  # the digest that the file must have

    def as_json(self) -> str:
        """The file's content, with a digest of itself."""
        return record_of(asdict(self))

    @classmethod
    def from_json(cls, content: str) -> Self:
        """The record that `as_json` has written; refused where it has changed since.

        Records of 0.3.0 have no stamp.
        """
        body = {"stamp": ""} | from_record(content)
        kinds = get_type_hints(cls) | {"chunks": list}
        if set(body) != {field.name for field in fields(cls)} or not all(
            isinstance(value, kinds[name]) for name, value in body.items()
        ):
            raise LibraryError("it is not what was written")
        pairs = [tuple(chunk) for chunk in body["chunks"] if isinstance(chunk, list)]
        if [list(map(type, pair)) for pair in pairs] != [[int, int]] * len(body["chunks"]):
            raise LibraryError("its passages are no spans of characters")
        return cls(**{**body, "chunks": tuple(pairs)})


SETTLED_NS = 2_000_000_000
"""No file system's clock is coarser."""


def file_stamp(status: os.stat_result) -> str:
    """Size and times of a regular file, which change with its content; empty for other files.

    The time of the last status change is among them, since programs can set the other one back.
    """
    if not stat.S_ISREG(status.st_mode):
        return ""
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def settled_stamp(status: os.stat_result) -> str:
    """The `file_stamp` of a file that is being read; empty if a later change could get the same."""
    is_old = max(status.st_mtime_ns, status.st_ctime_ns) < time.time_ns() - SETTLED_NS
    return file_stamp(status) if is_old else ""


def each_once(documents: Iterable[Text | tuple[str, str]]) -> list[Text]:
    """The texts, under names that stay on their line; one that is given twice counts once."""
    found: dict[str, Text] = {}
    for each in documents:
        text = each if isinstance(each, Text) else _of_pair(each)
        printable = (letter if letter.isprintable() else " " for letter in text.name)
        text = replace(text, name="".join(printable))
        if found.setdefault(text.key, text).text != text.text:
            raise InvalidArgumentError(
                f"documents: expected one text under a name, got two under {text.name!r}; give one "
                "of them another name"
            )
    return list(found.values())


def _of_pair(given: Any) -> Text:
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise InvalidTypeError(
            f"documents: expected a Text or a pair of a name and a text, got {given!r:.60}; of a "
            "dict pass its items()"
        )
    return Text(name=given[0], text=given[1])


def passages(text: str) -> list[Span]:
    """Where passages of 200 words are; each begins with the last 50 words of the one before.

    Together they hold every word. The last one is shorter; a text without words has none.
    """
    words = [found.span() for found in _WORD.finditer(text)]
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
