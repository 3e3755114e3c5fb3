"""From files and folders to the documents of a library."""

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from snapkv.app import text_files
from snapkv.errors import DocumentError
from snapkv.library.records import Record, Text


@dataclass(frozen=True, kw_only=True)
class Found:
    """What files and folders hold."""

    texts: list[Text] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    gone: list[Record] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def find(sources: Sequence[str], known: Sequence[Record], library: Path) -> Found:
    """Read files, folders and "-" as `text_files.read` does, each by itself."""
    found = Found()
    for source in sources:
        before = _from(source, known)
        try:
            read = text_files.read([source], on_notice=found.notices.append, without=library)
        except DocumentError as error:
            gone = [record for record in before if not os.path.lexists(record.where)]
            found.gone.extend(gone)
            if not gone or os.path.isfile(source) or len(gone) < len(before):
                found.failed[source] = str(error)
            continue
        texts = [_text(document, source) for document in read]
        found.texts.extend(texts)
        _tell_gone(found, before, {text.source for text in texts})
    return found


def _text(document: text_files.TextFile, source: str) -> Text:
    file = None if source == text_files.STDIN else os.path.abspath(document.name)
    return Text(name=document.name, text=document.text, source=file)


def _from(source: str, known: Iterable[Record]) -> list[Record]:
    """Documents that were read from a file, or from below a folder."""
    place = os.path.abspath(source)
    return [
        record for record in known if record.source and Path(record.source).is_relative_to(place)
    ]


def _tell_gone(found: Found, before: Iterable[Record], there: Collection[str | None]) -> None:
    """Documents without a file now; one that is there and was not read today is not gone."""
    for record in before:
        if record.source in there:
            continue
        if _has_text(record.where):
            found.notices.append(f"kept: {record.name}: its file is there, but was not read")
        else:
            found.gone.append(record)


def _has_text(file: str) -> bool:
    """Whether a file is there, and not empty."""
    try:
        return os.stat(file).st_size > 0
    except OSError:
        return os.path.lexists(file)
