"""Read documents as text: files, folders and standard input."""

import errno
import json
import mimetypes
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from snapkv.errors import DocumentError, SnapKVError, wrong
from snapkv.validation import format_bytes, nearest, printable, without_controls
from snapkv_app.decoding import decode, is_binary, not_text, refused
from snapkv_app.document_process import PROCESS
from snapkv_app.file_kinds import kind_of
from snapkv_app.library.records import Text, settled_stamp

STDIN = "-"

NoticeSink = Callable[[str], None]
"""Called with a line about a file that was skipped or is read in part."""

_MOST_BYTES = 2**26
"""The most bytes of text that one call reads, about 16 million tokens."""

_MOST_DOCUMENT_BYTES = 2**29
"""The most bytes that a document may have, with its images."""

_OTHER_DOCUMENTS = {
    ".doc",
    ".docx",
    ".epub",
    ".odp",
    ".ods",
    ".odt",
    ".ppt",
    ".pptx",
    ".xls",
    ".xlsx",
}
"""Suffixes of documents. A file of a folder with such a suffix that is not a document is reported
as skipped; other binary files are skipped silently."""

_SKIPPED_FOLDERS = {"__pycache__", "CVS", "node_modules", "site-packages", "vendor", "venv"}

_FORMS = {
    ".pdf": "pdf",
    **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
    **dict.fromkeys((".eml", ".mht", ".mhtml"), "mail"),
    ".ipynb": "notebook",
}
"""How `documents.read_document` reads files with these suffixes."""

_ESCAPED = re.compile(r"\\\\|((?:\\u[0-9a-fA-F]{4})++)")


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{without_controls(line)}\n")


def read(
    sources: Sequence[str], *, on_notice: NoticeSink = _to_stderr, without: Path | None = None
) -> list[Text]:
    """Read the text of every source, in their order.

    A file is plain text, Markdown or source code, or a document: HTML, PDF, a Jupyter notebook, an
    e-mail, EPUB, RTF, or a file of Word, Excel, PowerPoint or OpenDocument. Line ends become those
    of Unix, empty lines at both ends are removed, and escaped letters in JSON files are decoded.
    Otherwise plain text is read unchanged.

    A folder stands for all files with text below it, sorted by path. These are skipped: hidden
    files, folders of version control, caches, third-party code, libraries that `snapkv library` has
    made, the folder `without`, and files that are empty or not text. A file of a folder that should
    have text but cannot be read is skipped, too, and reported to `on_notice`.

    Args:
        sources: files, folders, or "-" for standard input.
        on_notice: called with a line "skipped: name: reason" for every file that cannot be read,
            and "partly read: name: reason" for every file with parts that are not in its text.
        without: a folder to skip.

    Returns:
        One text for every file. Bytes of a name that are not UTF-8 are escaped.

    Raises:
        DocumentError: there is no source, or "-" is passed twice; a source is missing, cannot be
            read or has no text; or the texts are too long together.
        MissingDependencyError: the library that reads a document is not installed.
    """
    if not sources:
        raise wrong(
            "files",
            "expected at least one file, but got none",
            "Use the name of a file, or - for standard input",
            DocumentError,
        )
    if list(sources).count(STDIN) > 1:
        raise wrong(
            "files",
            "expected standard input (-) only once, but got it again",
            "Use - only once",
            DocumentError,
        )
    files = _Files(without)
    found = [document for source in sources for document in files.read(source)]
    for what, reason in files.notices.items():
        on_notice(f"{what}: {reason}")
    return found


def read_with_notices(sources: Sequence[str]) -> tuple[list[Text], list[str]]:
    """Read every source as `read` does, and write each of its notices to standard error.

    The errors are those of `read`.

    Returns:
        The texts, and the notices.
    """
    lines: list[str] = []

    def note(line: str) -> None:
        lines.append(line)
        _to_stderr(line)

    return read(sources, on_notice=note), lines


def join(documents: Sequence[Text]) -> str:
    """Join documents into one text; if there are several, a line with its name precedes each.

    Empty without documents.
    """
    if len(documents) == 1:
        return documents[0].text
    return "\n\n".join(f"===== {document.name} =====\n{document.text}" for document in documents)


class _TooMuchError(DocumentError):
    """The sources together have too much text, which skipping one file does not solve."""


class _Files:
    """A reader of the sources of one call of `read`, which counts the bytes of their texts.

    Attributes:
        notices: the reasons by "skipped: name" or "partly read: name" of a file.
    """

    def __init__(self, without: Path | None) -> None:
        self._without, self._left = without, _MOST_BYTES
        self.notices: dict[str, str] = {}

    def read(self, source: str) -> list[Text]:
        """Read a file, all files of a folder, or standard input.

        Raises:
            DocumentError: the source is missing or cannot be read, or has too much text.
            MissingDependencyError: the library that reads a document is not installed.
        """
        if source == STDIN:
            return [self._parsed(None, self._content(sys.stdin.buffer, None))]
        if not source:
            raise refused(
                "expected a file or folder, but got an empty name",
                "Use the name of a file, or - for standard input",
            )
        if "://" in source and not os.path.lexists(source):
            raise refused(
                f"expected a file or folder, but got the address {source!r}, which cannot be "
                "downloaded",
                "Download the file first, and use the name of the file",
            )
        path = Path(source)
        try:
            if path.is_dir():
                return self._below(path)
            _require_file(path)
            with path.open("rb") as file:
                stamp = settled_stamp(os.fstat(file.fileno()))  # before it is read
                return [self._parsed(path, self._content(file, path), stamp)]
        except OSError as error:
            raise _unreadable(error, source) from error

    def _below(self, folder: Path) -> list[Text]:
        """Read the files with text below a folder, and add skipped files to `notices`.

        Raises:
            DocumentError: the folder has no file with text, or its files have too much text.
            MissingDependencyError: the library that reads a document is not installed.
        """
        found: list[Text] = []
        reasons: dict[str, str] = {}
        for path in _files_below(folder, self._without):
            try:
                found += self._if_text(path)
            except _TooMuchError:
                raise
            except DocumentError as error:
                reasons[printable(str(path))] = " ".join(str(error).removeprefix("file: ").split())
        if not found:
            unread = ""
            if reasons:
                first = next(iter(reasons.values()))
                unread = f", or cannot be read ({len(reasons):,} of them: {first})"
            raise refused(
                f"expected a folder that contains text files, but all files in {folder} are "
                f"hidden, empty or binary{unread}",
                "Use a folder that contains text files",
            )
        self.notices |= {f"skipped: {name}": reason for name, reason in reasons.items()}
        return found

    def _if_text(self, path: Path) -> list[Text]:
        """Read a file of a folder.

        Returns:
            The text; an empty list if the file is empty, or is binary and its suffix does not
            promise text.

        Raises:
            DocumentError: the file cannot be read, or is binary although its suffix promises text.
            MissingDependencyError: the library that reads the document is not installed.
        """
        try:
            with path.open("rb") as file:
                stamp = settled_stamp(os.fstat(file.fileno()))  # before it is read
                data = self._content(file, path)
        except OSError as error:
            raise _unreadable(error, str(path)) from error
        if not data.strip():
            return []
        if is_binary(data) and not _form_of(path, data):
            kind = str(mimetypes.guess_type(path.name)[0])
            if kind.startswith("text/") or path.suffix.lower() in _OTHER_DOCUMENTS:
                raise not_text(printable(str(path)), data)
            return []
        return [self._parsed(path, data, stamp)]

    def _content(self, file: BinaryIO, path: Path | None) -> bytes:
        """Read the content of a file, and count the bytes of a text.

        Raises:
            DocumentError: a text has more bytes than are left, or a document more than documents
                may have.
        """
        data, most = file.read(self._left + 1), self._left
        if _form_of(path, data):
            most = _MOST_DOCUMENT_BYTES
            data += file.read(max(most + 1 - len(data), 0))
        elif is_binary(data):
            return data
        else:
            self._left -= len(data)
        if len(data) > most:
            raise _too_much(path)
        return data

    def _parsed(self, path: Path | None, data: bytes, stamp: str = "") -> Text:
        """Build the text of a file from its content.

        Raises:
            DocumentError: the content cannot be read, has no text, or has too much text.
            MissingDependencyError: the library that reads this document is not installed.
        """
        name, form = _name_of(path), _form_of(path, data)
        if form is None:
            text, losses = decode(name, data), list[str]()
        elif reading := PROCESS.read(form, name, data, self._left):
            text, losses = reading
            self._left -= len(text.encode())
        else:
            raise _too_much(path)
        if path is not None and path.suffix.lower() in (".json", ".jsonl"):
            text = _ESCAPED.sub(_unescaped, text)
        if not text.strip():
            problem = "; ".join([f"{name} contains no text", *losses])
            raise refused(problem, "Use a file that contains text")
        if losses:
            self.notices[f"partly read: {name}"] = "; ".join(losses)
        # A pipe such as <(command) cannot be read again, so it has no source.
        source = os.path.abspath(name) if path is not None and path.is_file() else None
        return Text(name=name, text=text.strip("\n"), source=source, stamp=stamp)


def _name_of(path: Path | None) -> str:
    return "standard input" if path is None else printable(str(path))


def _form_of(path: Path | None, data: bytes) -> str | None:
    """Return the form in which `documents.read_document` reads a file; None for plain text."""
    if data.startswith(b"%PDF-"):
        return "pdf"
    if data.startswith(b"{\\rtf"):
        return "application/rtf"
    suffix = "" if path is None else path.suffix.lower()
    form = _FORMS.get(suffix)
    if form is None and data[:64].lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "html"
    if form is None and is_binary(data) and (kind := kind_of(data, suffix)):
        return kind.mime or None
    return form


def _unescaped(found: re.Match[str]) -> str:
    """Return the letters of an escape sequence of JSON, or the sequence if JSON needs it."""
    text = json.loads(f'"{found[0]}"')
    return text if text.isprintable() and not {'"', "\\"} & set(text) else found[0]


def _too_much(path: Path | None) -> SnapKVError:
    """Build the `DocumentError` for sources that have too much text with the file at `path`."""
    most, largest = format_bytes(_MOST_BYTES), format_bytes(_MOST_DOCUMENT_BYTES)
    bounds = f"expected at most {most} of text, and documents of at most {largest}"
    remedy = "Use a smaller file, for example a part that was made by split -C 32M"
    return wrong("file", f"{bounds}, but got more with {_name_of(path)}", remedy, _TooMuchError)


def _unreadable(error: OSError, name: str) -> SnapKVError:
    """Build the `DocumentError` for a file that the system cannot read."""
    place = printable(str(error.filename or name))
    problem = f"{place} could not be read: {error.strerror}"
    return refused(problem, "Use a file that can be read")


def _require_file(path: Path) -> None:
    """Raise unless there is a file or a pipe at a path.

    Raises:
        DocumentError: the path is that of a device, or nothing is there.
        OSError: the folder of the path cannot be read.
    """
    if path.is_file() or path.is_fifo():
        return
    if path.exists():
        problem = f"expected a regular file or folder, but got the device {path}"
        raise refused(problem, "Use a regular file, or use - for standard input")
    names = os.listdir(path.parent) if path.parent.is_dir() else ()
    got = f"{printable(str(path))}{link_fault(path)}"
    remedy = nearest(path.name, names, where_to_look(path))
    raise refused(f"expected an existing file or folder, but got {got}", remedy)


def where_to_look(path: Path) -> str:
    """Return the remedy of an error about a missing file: where to look for it."""
    if not path.parent.is_dir():
        return f"There is no folder with the name {path.parent}"
    return f"Run ls {shlex.quote(str(path.parent))} to see the files"


def link_fault(path: Path) -> str:
    """Return the clause that says why the symbolic link at a path leads nowhere.

    Empty if there is no such link.
    """
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return ", which contains a loop of symbolic links"
        if path.is_symlink():
            return f", which is a symbolic link to {os.readlink(path)}, which does not exist"
    return ""


def _files_below(folder: Path, without: Path | None) -> list[Path]:
    """Return the files below a folder that are neither hidden nor third-party, sorted by path.

    Libraries of `snapkv library` and the folder `without` are skipped.
    """
    paths = []
    left_out = None if without is None else os.path.realpath(without)
    for place, folders, files in os.walk(folder):
        if os.path.realpath(place) == left_out or _is_library(place):
            folders.clear()
            continue
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS and name[0] != "."]
        paths += [Path(place, name) for name in files if name[0] != "."]
    return sorted(path for path in paths if path.is_file() or not path.exists())


def _is_library(folder: str) -> bool:
    """Return whether a folder is a library that `snapkv library` has made."""
    try:
        with open(os.path.join(folder, "library.json"), "rb") as file:
            return b'"snapkv library ' in file.read(64)
    except OSError:
        return False
