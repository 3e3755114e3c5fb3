"""The documents of a library that a question finds, and whether their files have changed.

Importable without torch, so that a question that cannot be answered is refused at once.
"""

import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass

from snapkv.cache.saving.records import digest_of
from snapkv.errors import DocumentError, LibraryError
from snapkv_app import text_files
from snapkv_app.library.library import Library
from snapkv_app.library.records import Record, file_stamp
from snapkv_app.library.searching import Hit
from snapkv_app.library_files import path_of_source


@dataclass(frozen=True, kw_only=True)
class Found:
    """The documents for a question, the best first, and the time of the search."""

    hits: Sequence[Hit]
    search_ms: float


def search(library: Library, question: str, documents: int) -> Found:
    """Find the documents for a question.

    Raises:
        DocumentError: the library is empty, or no document has a word of the question.
    """
    start = time.perf_counter()
    hits = library.search(question, documents)
    place = shlex.quote(str(library.path))
    if not hits and not library.documents:
        raise DocumentError(
            f"library: expected documents, got none in {str(library.path)!r}; add some with snapkv "
            f"library add FILES --to {place}"
        )
    if not hits:
        raise DocumentError(
            f"question: expected words of the documents in {str(library.path)!r}, got "
            f"{question!r}, which has none of them; ask with other words (snapkv library list "
            f"{place} names the documents), or name files instead of --library"
        )
    return Found(hits=hits, search_ms=1000 * (time.perf_counter() - start))


def changed_sources(library: Library, hits: Sequence[Hit], *, is_allowed: bool) -> list[str]:
    """Compare the documents of hits with the files that they were read from.

    Returns:
        A line for each document whose file has changed, is missing or cannot be read.

    Raises:
        LibraryError: there is such a document, unless it `is_allowed`.
    """
    changes: dict[str, str] = {}
    for hit in hits:
        record = library.record(hit)
        if (change := _change(record)) is not None:
            changes[_typed_path(record)] = f"{hit.name} {change}"
    if changes and not is_allowed:
        add = shlex.join(["snapkv", "library", "add", *changes, "--to", str(library.path)])
        raise LibraryError(
            f"library: {' and '.join(changes.values())}; run {add}, or pass --allow-changed to "
            "answer from what was read"
        )
    return [f"{change}; the answer is from what was read" for change in changes.values()]


def _change(record: Record) -> str | None:
    """What happened to the file of a document since it was read; None if its text is the same."""
    if record.source is None:
        return None
    path = path_of_source(record.source)
    try:
        if record.stamp and file_stamp(os.stat(path)) == record.stamp:
            return None
        (now,) = text_files.read([path], on_notice=lambda _: None)
    except (OSError, DocumentError) as error:
        if not os.path.lexists(path):
            return "was deleted or moved since it was read"
        return f"cannot be compared with what was read ({str(error).removeprefix('file: ')})"
    is_same = digest_of(now.text) == record.sha256
    return None if is_same else "has changed since it was read"


def _typed_path(record: Record) -> str:
    """The path of a document's file as it was typed, if that leads there from this folder."""
    source = path_of_source(str(record.source))
    is_typed = os.path.abspath(record.name) == source and not record.name.startswith("-")
    return record.name if is_typed else source
