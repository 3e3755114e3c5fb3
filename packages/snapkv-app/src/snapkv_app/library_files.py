"""From files and folders to the documents of a library."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from snapkv.errors import DocumentError
from snapkv.validation import printable
from snapkv_app import text_files
from snapkv_app.library.index import DocumentEntry
from snapkv_app.library.library import Library
from snapkv_app.library.records import Text


@dataclass(frozen=True, kw_only=True)
class Found:
    """The contents of files and folders."""

    texts: list[Text] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # what cannot be read, and why
    gone: list[DocumentEntry] = field(
        default_factory=list
    )  # of the library, whose files were deleted
    notices: list[str] = field(default_factory=list)  # a line for every skipped file


def find(sources: Sequence[str], library: Library) -> Found:
    """Read files, folders and "-" as `text_files.read` does, each by itself, but not the library.

    What the library has of them is compared.
    """
    found = Found()
    for source in sources:
        place = os.path.abspath(source)
        before = library.below(place)
        try:
            texts = text_files.read([source], on_notice=found.notices.append, without=library.path)
        except DocumentError as error:
            gone = [each for each in before if not os.path.lexists(path_of_source(each.where))]
            found.gone.extend(gone)
            if not gone or os.path.isfile(source) or len(gone) < len(before):
                found.failed[printable(source)] = str(error)
            continue
        found.texts.extend(texts)
        there = {text.source for text in texts}
        for record in (each for each in before if each.source not in there):
            if _has_text(path_of_source(record.where)):
                found.notices.append(f"kept: {record.name}: its file is there, but was not read")
            else:
                found.gone.append(record)
    return found


def path_of_source(source: str) -> str:
    """Return the path of a document's file; in `source`, bytes that are not UTF-8 are escaped."""
    if os.path.lexists(source):
        return source
    return os.fsdecode(_ESCAPED.sub(_byte, os.fsencode(source)))


_ESCAPED = re.compile(rb"\\x([89a-f][0-9a-f])")


def _byte(escaped: re.Match[bytes]) -> bytes:
    return bytes.fromhex(escaped[1].decode())


def _has_text(file: str) -> bool:
    try:
        return os.stat(file).st_size > 0
    except OSError:
        return os.path.lexists(file)
