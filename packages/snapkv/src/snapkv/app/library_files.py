"""From files and folders to the documents of a library."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from snapkv.app import text_files
from snapkv.errors import DocumentError
from snapkv.library.index import Entry
from snapkv.library.library import Library
from snapkv.library.records import Text


@dataclass(frozen=True, kw_only=True)
class Found:
    """What files and folders hold."""

    texts: list[Text] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # what cannot be read, and why
    gone: list[Entry] = field(default_factory=list)  # of the library, whose files are no more
    notices: list[str] = field(default_factory=list)  # a line about every file that was left out


def find(sources: Sequence[str], library: Library) -> Found:
    """Read files, folders and "-" as `text_files.read` does, each by itself, but not the library.

    What the library has of them is compared.
    """
    found = Found()
    for source in sources:
        place = os.path.abspath(source)
        before = library.below(place)
        try:
            read = text_files.read([source], on_notice=found.notices.append, without=library.path)
        except DocumentError as error:
            gone = [record for record in before if not os.path.lexists(record.where)]
            found.gone.extend(gone)
            if not gone or os.path.isfile(source) or len(gone) < len(before):
                found.failed[source] = str(error)
            continue
        texts = [_text(document, source) for document in read]
        found.texts.extend(texts)
        there = {text.source for text in texts}
        for record in (each for each in before if each.source not in there):
            if _has_text(record.where):
                found.notices.append(f"kept: {record.name}: its file is there, but was not read")
            else:
                found.gone.append(record)
    return found


def _text(document: text_files.TextFile, source: str) -> Text:
    file = None if source == text_files.STDIN else os.path.abspath(document.name)
    return Text(name=document.name, text=document.text, source=file)


def _has_text(file: str) -> bool:
    try:
        return os.stat(file).st_size > 0
    except OSError:
        return os.path.lexists(file)
