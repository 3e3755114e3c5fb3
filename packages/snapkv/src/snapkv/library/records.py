"""What a library knows of a document: its text, its passages, and which file holds its cache."""

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Self

from snapkv.document_files import digest_of, from_record, record_of
from snapkv.errors import InvalidArgumentError, InvalidTypeError, LibraryError
from snapkv.library.passages import Span
from snapkv.validation import nearest

_KEY_DIGITS = 24


@dataclass(frozen=True, kw_only=True)
class Text:
    """A document to add.

    Attributes:
        name: what answers call it.
        text: all of it; not empty.
        source: the file it comes from, as an absolute path; None for a text that was given. Adding
            the same source again, or without one the same name, replaces the document.
    """

    name: str
    text: str
    source: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be a document.

        Raises:
            InvalidTypeError: not texts.
            InvalidArgumentError: an empty one, or one that has no UTF-8.
        """
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
            _require_unicode(argument, value, self.name)

    @property
    def key(self) -> str:
        """What files of this document are named by."""
        told = f"text\0{self.name}" if self.source is None else f"file\0{self.source}"
        return digest_of(told)[:_KEY_DIGITS]


def _require_unicode(argument: str, value: str, name: str) -> None:
    """Refuse what no tokenizer takes."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"{argument}: expected Unicode text, got {value[error.start]!r}, half of a character, "
            f"in {name!r}; decode it with errors='replace'"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Record:
    """A document of a library.

    Attributes:
        name: as in answers.
        source: the file it was read from; None for a text that was given.
        size: bytes of the text in UTF-8.
        sha256: of them.
        text: all of it.
        chunks: its passages for retrieval, half-open spans of characters.
        tokens: how many the model has read, the library's prefix not counted.
        bytes: of the file with its cache.
        cache: the name of that file.
        seal: the digest that the file must have.
    """

    name: str
    source: str | None
    size: int
    sha256: str
    text: str
    chunks: tuple[Span, ...]
    tokens: int
    bytes: int
    cache: str
    seal: str

    @property
    def key(self) -> str:
        """What its files are named by."""
        return Text(name=self.name, text=self.text, source=self.source).key

    @property
    def where(self) -> str:
        """Its source, or else its name."""
        return self.source or self.name

    def as_json(self) -> str:
        """The file's content, with a digest of itself."""
        return record_of(asdict(self))

    @classmethod
    def from_json(cls, content: str) -> Self:
        """The record that `as_json` has written.

        Raises:
            LibraryError: it is not one, or has changed since.
        """
        body = from_record(content)
        if set(body) != {field.name for field in fields(cls)}:
            raise LibraryError("it is not what was written")
        return cls(**{**body, "chunks": tuple((start, stop) for start, stop in body["chunks"])})


def each_once(documents: Iterable[Text | tuple[str, str]]) -> list[Text]:
    """The texts; one that is given twice counts once."""
    found: dict[str, Text] = {}
    for each in documents:
        text = each if isinstance(each, Text) else Text(name=each[0], text=each[1])
        text = replace(text, name=_printable(text.name))
        if found.setdefault(text.key, text).text != text.text:
            raise InvalidArgumentError(
                f"documents: expected one text under a name, got two under {text.name!r}; give one "
                "of them another name"
            )
    return list(found.values())


def _printable(name: str) -> str:
    """A name that stays on its line, in a terminal and in a prompt."""
    return "".join(each if each.isprintable() else " " for each in name)


def keys_of(name: str, records: dict[str, Record]) -> list[str]:
    """The key of the document of that name, or that file.

    Raises:
        LibraryError: there is none.
    """
    asked = (name, os.path.abspath(name))
    found = [
        key for key, record in records.items() if record.name == name or record.source in asked
    ]
    if not found:
        names = [record.name for record in records.values()]
        raise LibraryError(
            f"name: expected a document of the library, got {name!r}, which is none"
            f"{nearest(name, names)}"
        )
    return found
