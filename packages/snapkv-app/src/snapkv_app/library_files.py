"""Find the documents of files and folders for a library, and the files of its documents.

Importing this file loads no torch, so that a question without an answer is refused quickly.
"""

import os
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from snapkv.cache.saving.records import digest_of
from snapkv.errors import DocumentError, LibraryError, wrong
from snapkv.validation import printable
from snapkv_app import text_files
from snapkv_app.library.index import DocumentEntry
from snapkv_app.library.library import Library
from snapkv_app.library.records import Record, Text, file_stamp
from snapkv_app.library.searching import Hit


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of `find`.

    Attributes:
        texts: the texts of the sources, in their order.
        failed: the error message for every source that cannot be read.
        gone: the documents of the library whose files were deleted.
        notices: a line for every file that was skipped, read only in part, or not read although
            the library has it.
    """

    texts: list[Text] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    gone: list[DocumentEntry] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def find(sources: Sequence[str], library: Library) -> Found:
    """Read the texts of files and folders, and find stored documents whose files were deleted.

    A source that cannot be read is listed in the result, and the others are still read. The folder
    of the library is skipped. Deleted files are only noticed if they were in one of the sources.
    The library is not changed.

    Args:
        sources: files, folders, or "-" for standard input.
        library: the library to which the texts will be added.

    Raises:
        LibraryError: the folder is not a library, or this Python's SQLite has no full-text search.
        MissingDependencyError: the library that reads a document is not installed.
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
                found.notices.append(f"kept: {record.name}: its file exists, but was not read")
            else:
                found.gone.append(record)
    return found


def path_of_source(source: str) -> str:
    """Return the path of the file of a document, from the source that is stored with it.

    Bytes that are not UTF-8 are escaped in `source`, and restored in the path, unless a file has
    the escaped name.
    """
    if os.path.lexists(source):
        return source
    return os.fsdecode(_ESCAPED.sub(_byte, os.fsencode(source)))


_ESCAPED = re.compile(rb"\\x([89a-f][0-9a-f])")


def _byte(escaped: re.Match[bytes]) -> bytes:
    return bytes.fromhex(escaped[1].decode())


def _has_text(file: str) -> bool:
    """Return whether a file exists and is not empty.

    An existing file whose size cannot be determined counts as not empty.
    """
    try:
        return os.stat(file).st_size > 0
    except OSError:
        return os.path.lexists(file)


def search(library: Library, question: str, documents: int) -> tuple[list[Hit], float]:
    """Search a library for the documents that match a question best.

    Args:
        library: the library.
        question: the question.
        documents: the largest number of documents to return.

    Returns:
        The documents, the best first, and the milliseconds that the search took.

    Raises:
        DocumentError: the library is empty, or no document contains a word of the question.
        InvalidArgumentError: `documents` is less than 1.
        LibraryError: there is no library, or this Python's SQLite has no full-text search.
    """
    start = time.perf_counter()
    hits = library.search(question, documents)
    place = shlex.quote(str(library.path))
    if not hits and not library.documents:
        raise wrong(
            "library",
            f"the library {str(library.path)!r} does not contain any documents",
            f"Run snapkv library add FILES --to {place} to add documents",
            DocumentError,
        )
    if not hits:
        raise wrong(
            "question",
            f"no word of {question!r} occurs in the documents of {str(library.path)!r}",
            f"Use different words (run snapkv library list {place} to see the documents), or use "
            "files instead of --library",
            DocumentError,
        )
    return hits, 1000 * (time.perf_counter() - start)


def changed_sources(library: Library, hits: Sequence[Hit], *, is_allowed: bool) -> list[str]:
    """Compare the documents of a search with the files from which they were read.

    Args:
        library: the library.
        hits: the documents. Those that were not read from a file count as unchanged.
        is_allowed: whether files may have changed; otherwise a change is an error.

    Returns:
        A line for each document whose file has changed, is missing or cannot be read.

    Raises:
        MissingDependencyError: a file must be read, and its library is not installed.
        LibraryError: there is such a document and `is_allowed` is False, or a document was removed
            after the search.
    """
    changes: dict[str, str] = {}
    for hit in hits:
        record = library.record(hit)
        if (change := _change(record)) is not None:
            changes[_typed_path(record)] = f"{hit.name} {change}"
    if changes and not is_allowed:
        add = shlex.join(["snapkv", "library", "add", *changes, "--to", str(library.path)])
        raise wrong(
            "library",
            " and ".join(changes.values()),
            f"Run {add}, or use --allow-changed to answer from the text that was read",
            LibraryError,
        )
    return [f"{change}; the answer uses the text that was read" for change in changes.values()]


def _change(record: Record) -> str | None:
    """Say how a document's file has changed since it was read.

    The file is only read if its size or times differ from those that are stored.

    Returns:
        A clause to be put after the name of the document, such as "has changed since it was read";
        None if the text is unchanged, or if the document was not read from a file.

    Raises:
        MissingDependencyError: the library that reads the file is not installed.
    """
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
        reason = str(error).removeprefix("file: ").removesuffix(".")
        return f"cannot be compared with what was read ({reason})"
    is_same = digest_of(now.text) == record.sha256
    return None if is_same else "has changed since it was read"


def _typed_path(record: Record) -> str:
    """Return the path of a document's file as the user typed it, if it still leads there.

    Otherwise return the absolute path.
    """
    source = path_of_source(str(record.source))
    is_typed = os.path.abspath(record.name) == source and not record.name.startswith("-")
    return record.name if is_typed else source
