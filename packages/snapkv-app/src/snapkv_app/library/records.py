"""Define the texts that are added to a library, and the records of stored documents."""

import os
import re
import stat
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self, get_type_hints

from snapkv.cache.saving.records import digest_of, from_record, record_of
from snapkv.errors import InvalidTypeError, LibraryError, wrong

PASSAGE_WORDS = 200
OVERLAP_WORDS = 50
_KEY_DIGITS = 24

WITHOUT_SPACES = (
    "\u2e80-\u2fdf\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
"""Chinese, Japanese and Korean characters, as a character class of a regular expression.

Each of them counts as a word, because these scripts put no spaces between words."""

_WORD = re.compile(f"[{WITHOUT_SPACES}]|[^\\s{WITHOUT_SPACES}]+")

Span = tuple[int, int]
"""The first character of a range and the first one after it."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text to add to a library.

    Attributes:
        name: the name of the document in answers.
        text: the whole text; not empty.
        source: the absolute path of the file that contains the text; None for a text without a
            file. A new text replaces the document with the same source, or with the same name if
            neither has a source.
        stamp: the `file_stamp` of that file when the text was read; empty if it is unknown.

    Raises:
        InvalidArgumentError: `name` or `text` is empty or is not valid Unicode.
        InvalidTypeError: `name` or `text` is not a string.
    """

    name: str
    text: str
    source: str | None = None
    stamp: str = ""

    def __post_init__(self) -> None:
        for argument in ("name", "text"):
            value = getattr(self, argument)
            if not isinstance(value, str):
                raise wrong(
                    argument,
                    f"expected a string, but got a value of type {type(value).__name__}",
                    "Use a value of type str",
                    InvalidTypeError,
                )
            if not value.strip():
                raise wrong(
                    argument,
                    f"the text of {self.name!r} must not be empty, but got {value[:20]!r}",
                    "Remove this document",
                )
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise wrong(
                    argument,
                    f"expected Unicode text, but got half of a character, {value[error.start]!r}, "
                    f"in {self.name!r}",
                    "Decode the text with errors='replace'",
                ) from error

    @property
    def key(self) -> str:
        """The 24 hexadecimal digits with which the names of the document's files begin.

        They are a digest of the source, or of the name if there is no source.
        """
        identity = f"text\0{self.name}" if self.source is None else f"file\0{self.source}"
        return digest_of(identity)[:_KEY_DIGITS]


@dataclass(frozen=True, kw_only=True)
class Record(Text):
    """The record of a stored document: its text, and the name of the file with its cache.

    The `About` of the library says which model has read the document, and how. The cache file
    contains the token ids, keys and values. `Reader` builds a `Part` from them, which can be joined
    with other parts, and an engine that serves models can load them into its blocks (`CachedPrefix`
    of `snapkv_vllm`).
    """

    size: int  # bytes of the text in UTF-8
    sha256: str  # of these bytes
    chunks: tuple[Span, ...]  # its passages for retrieval
    tokens: int  # of the document, without the library's prefix
    bytes: int  # of the file with its cache
    cache: str  # the name of that file
    seal: str  # the digest that an undamaged file has

    def as_json(self) -> str:
        """Return the content of the file of this record, including its own digest."""
        return record_of(asdict(self))

    @classmethod
    def from_json(cls, content: str) -> Self:
        """Build the record from the content of its file.

        Records of version 0.3.0 have no stamp.

        Raises:
            LibraryError: the content was changed, or is not that of a record. The message is a
                reason, which the caller completes with the name of the file.
            InvalidArgumentError: the name or the text in the record is empty.
        """
        body = {"stamp": ""} | from_record(content)
        kinds = get_type_hints(cls) | {"chunks": list}
        if set(body) != {field.name for field in fields(cls)} or not all(
            isinstance(value, kinds[name]) for name, value in body.items()
        ):
            raise LibraryError("the content of the file has changed since it was written")
        pairs = [tuple(chunk) for chunk in body["chunks"] if isinstance(chunk, list)]
        if [list(map(type, pair)) for pair in pairs] != [[int, int]] * len(body["chunks"]):
            raise LibraryError("the passages of the record are not spans of characters")
        return cls(**{**body, "chunks": tuple(pairs)})


SETTLED_NS = 2_000_000_000
"""The resolution of the coarsest clock of any file system, in nanoseconds.

If a file is changed that long after its last change, its time changes, too."""


def file_stamp(status: os.stat_result) -> str:
    """Return a text that changes when the content of a regular file changes.

    Returns:
        The size, the time of the last modification, and the time of the last status change, because
        programs can reset the modification time. Empty for anything but a regular file.
    """
    if not stat.S_ISREG(status.st_mode):
        return ""
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def settled_stamp(status: os.stat_result) -> str:
    """Return the `file_stamp` of a file, if no later change can have the same one.

    Returns:
        The stamp; empty if the file was changed so recently that another change could get the same
        times, and for anything but a regular file.
    """
    is_old = max(status.st_mtime_ns, status.st_ctime_ns) < time.time_ns() - SETTLED_NS
    return file_stamp(status) if is_old else ""


def each_once(documents: Iterable[Text | tuple[str, str]]) -> list[Text]:
    """Turn documents into texts, and leave out repeated ones.

    Args:
        documents: `Text` objects, or pairs of a name and a text.

    Returns:
        Copies of the texts in order. Line breaks and other unprintable characters of their names
        are replaced by spaces. A document that is repeated with the same text is returned one time.

    Raises:
        InvalidArgumentError: two different texts have the same source, or have no source and the
            same name. Or a name or a text is empty or is not valid Unicode.
        InvalidTypeError: a document is neither a `Text` nor a pair of strings.
    """
    found: dict[str, Text] = {}
    for each in documents:
        text = each if isinstance(each, Text) else _of_pair(each)
        printable = (letter if letter.isprintable() else " " for letter in text.name)
        text = replace(text, name="".join(printable))
        if found.setdefault(text.key, text).text != text.text:
            raise wrong(
                "documents",
                f"two different texts have the name {text.name!r}",
                "Use a different name for one of the texts",
            )
    return list(found.values())


def _of_pair(pair: Any) -> Text:
    """Build a text without a source from a pair of a name and a text.

    Raises:
        InvalidTypeError: it is neither a tuple nor a list of two elements, or they are not strings.
        InvalidArgumentError: the name or the text is empty or is not valid Unicode.
    """
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise wrong(
            "documents",
            f"expected a Text, or a pair of a name and a text, but got {pair!r:.60}",
            "For example, use the items() of a dictionary",
            InvalidTypeError,
        )
    return Text(name=pair[0], text=pair[1])


def passages(text: str) -> list[Span]:
    """Split a text into passages of 200 words; neighbouring passages share 50 of them.

    Every character of a script without spaces between words counts as a word.

    Returns:
        The spans of the passages in characters, in order. The last passage may be shorter. Empty
        for a text without words.
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
    """Return the numbers of the first and the last line of a span of characters of `text`.

    Lines are counted from 1, and only a line feed ends one. If the span ends with a line feed, the
    line after it is the last one, although the span has none of its characters.
    """
    start, stop = span
    first = text.count("\n", 0, start) + 1
    return first, first + text.count("\n", start, stop)
