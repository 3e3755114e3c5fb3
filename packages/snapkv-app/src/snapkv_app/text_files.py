"""Reading documents as text: files, folders, HTML, PDF, notebooks and standard input."""

import codecs
import contextlib
import errno
import json
import logging
import mimetypes
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from snapkv.errors import DocumentError, missing_package
from snapkv.validation import format_bytes, nearest, printable, without_controls
from snapkv_app.file_kinds import FileKind, kind_of
from snapkv_app.library.records import Text, settled_stamp

STDIN = "-"

NoticeSink = Callable[[str], None]
"""Takes a line about a file that was left out, or read in part."""

_MOST_BYTES = 2**26
"""Of all texts that are read at once: some 16 million tokens."""

_OTHER_DOCUMENTS = {".doc", ".docx", ".epub", ".odp", ".ods", ".odt", ".pptx", ".xls", ".xlsx"}
"""Suffixes of files with text that cannot be read."""

_SKIPPED_FOLDERS = {"__pycache__", "CVS", "node_modules", "site-packages", "vendor", "venv"}

# The longer mark first: UTF-32's begins with UTF-16's.
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}

_IN_BROWSERS = {
    **dict.fromkeys(("ascii", "iso8859-1"), "windows-1252"),
    **dict.fromkeys(("utf-16", "utf-16-be", "utf-16-le"), "utf-8"),
    **dict.fromkeys(("gb2312", "gbk"), "gb18030"),
    "shift_jis": "cp932",
    "euc_kr": "cp949",
}
"""What a page is read as that declares an encoding, by Python's name: the Encoding Standard."""

_OPENED = re.compile(r"<html[\s>]", re.IGNORECASE)
_CLOSED = re.compile(r"</html\s*>", re.IGNORECASE)
_END_OF_PDF = b"%%EOF"


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{without_controls(line)}\n")


def read(
    sources: Sequence[str], *, on_notice: NoticeSink = _to_stderr, without: Path | None = None
) -> list[Text]:
    """Read every source, in the order given; bytes of a name that are not UTF-8 are escaped.

    A source is a file (text, Markdown, source code, HTML, PDF or a Jupyter notebook), a folder, or
    "-" for standard input. A folder stands for all text files below it, sorted by path; hidden
    files, folders of version control, caches, third-party code, libraries that `snapkv library` has
    made, the folder `without`, and files that are empty or not text are left out of it. So are
    files that should have text and cannot be read, and each is told of once, as "skipped: name:
    reason". A file that is named as a source is never left out: it is read or refused. Where only a
    part of a file could be read (a PDF that was cut off, or has pages without text; HTML without
    its end), that is told once, as "partly read: name: reason".
    """
    if not sources:
        raise DocumentError("files: expected at least one file, got none; pass a file or -")
    if list(sources).count(STDIN) > 1:
        raise DocumentError("files: expected - once at most, got it more often; pass it once")
    files = _Files(without)
    found = [document for source in sources for document in files.read(source)]
    for what, reason in files.notices.items():
        on_notice(f"{what}: {reason}")
    return found


def read_noting(sources: Sequence[str]) -> tuple[list[Text], list[str]]:
    """As `read`, with the lines about what was left out, which go to standard error too."""
    lines: list[str] = []

    def note(line: str) -> None:
        lines.append(line)
        _to_stderr(line)

    return read(sources, on_notice=note), lines


def join(documents: Sequence[Text]) -> str:
    """The documents as one text, each under a line with its name where there are several."""
    if len(documents) == 1:
        return documents[0].text
    return "\n\n".join(f"===== {document.name} =====\n{document.text}" for document in documents)


class _TooMuchError(DocumentError):
    """More text than can be read, of which no part is left out."""


class _Files:
    """Reads sources, and notes once what has become of a file that was not read whole, and why."""

    def __init__(self, without: Path | None) -> None:
        self._without, self._left = without, _MOST_BYTES
        self.notices: dict[str, str] = {}

    def read(self, source: str) -> list[Text]:
        if source == STDIN:
            return [self._parsed(None, self._content(sys.stdin.buffer, "standard input"))]
        if not source:
            raise DocumentError(
                "file: expected a file or folder, got an empty name; pass a path or -"
            )
        if "://" in source and not os.path.lexists(source):
            raise DocumentError(
                f"file: expected a file or folder, got the address {source!r}, which is not "
                "fetched; download it and pass the file"
            )
        path = Path(source)
        try:
            if path.is_dir():
                return self._below(path)
            _require_file(path)
            with path.open("rb") as file:
                stamp = settled_stamp(os.fstat(file.fileno()))  # before it is read
                return [self._parsed(path, self._content(file, printable(str(path))), stamp)]
        except OSError as error:
            raise _unreadable(error, source) from error

    def _below(self, folder: Path) -> list[Text]:
        """What can be read below a folder; notes why a file that should have text cannot."""
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
                unread = f" and can be read ({len(reasons):,} cannot: {first})"
            raise DocumentError(
                f"file: expected a folder with text files, got {folder} without any that is not "
                f"hidden, empty or binary{unread}; pass a folder with text files"
            )
        self.notices |= {f"skipped: {name}": reason for name, reason in reasons.items()}
        return found

    def _if_text(self, path: Path) -> list[Text]:
        """The document in a file; none where it is empty, or binary and not called a text."""
        try:
            with path.open("rb") as file:
                stamp = settled_stamp(os.fstat(file.fileno()))  # before it is read
                data = self._content(file, printable(str(path)))
        except OSError as error:
            raise _unreadable(error, str(path)) from error
        if not data.strip():
            return []
        if _is_binary(data):
            kind = str(mimetypes.guess_type(path.name)[0])
            if kind.startswith("text/") or path.suffix.lower() in _OTHER_DOCUMENTS:
                raise _no_text(printable(str(path)), data)
            return []
        return [self._parsed(path, data, stamp)]

    def _content(self, file: BinaryIO, name: str) -> bytes:
        """All bytes of a PDF, which may have large images, or of a text, which is bounded."""
        begun = file.read(self._left + 1)
        if b"%PDF-" in begun[:1024]:
            return begun + file.read()
        if not _is_binary(begun):
            self._left -= len(begun)
        if self._left < 0:
            most = format_bytes(_MOST_BYTES)
            raise _TooMuchError(
                f"file: expected at most {most} of text, got more with {name}; pass less, for "
                "instance a part that split -C 32M makes"
            )
        return begun

    def _parsed(self, path: Path | None, data: bytes, stamp: str = "") -> Text:
        """The text of a file's content, by suffix or, without a telling one, by its first bytes."""
        name = "standard input" if path is None else printable(str(path))
        suffix, lost = "" if path is None else path.suffix.lower(), list[str]()
        if suffix == ".pdf" or data.startswith(b"%PDF-"):
            text, lost = _pdf_text(name, data)
        elif suffix in (".html", ".htm", ".xhtml") or _looks_like_html(data):
            text, lost = _html_text(name, data)
        elif suffix == ".ipynb":
            text = _notebook_text(name, data)
        else:
            text = _decode(name, data)
        if not text.strip():
            raise DocumentError(
                f"file: expected text, got nothing in {name}; pass a file with text"
            )
        if lost:
            self.notices[f"partly read: {name}"] = "; ".join(lost)
        # What a pipe such as <(command) held cannot be read again.
        source = os.path.abspath(name) if path is not None and path.is_file() else None
        return Text(name=name, text=text.strip("\n"), source=source, stamp=stamp)


def _unreadable(error: OSError, name: str) -> DocumentError:
    return DocumentError(
        f"file: expected a readable file, got {printable(str(error.filename or name))}: "
        f"{error.strerror}; pass "
        "one that can be read"
    )


def _require_file(path: Path) -> None:
    if path.is_file() or path.is_fifo():
        return
    if path.exists():
        raise DocumentError(f"file: expected a regular file or folder, got the device {path}")
    names = os.listdir(path.parent) if path.parent.is_dir() else ()
    near = nearest(path.name, names) or where_to_look(path)
    raise DocumentError(
        f"file: expected an existing file or folder, got {printable(str(path))}{link_fault(path)}"
        f"{near}"
    )


def where_to_look(path: Path) -> str:
    """For a missing file, as the end of an error message."""
    if not path.parent.is_dir():
        return f"; there is no folder {path.parent}"
    return f"; see ls {shlex.quote(str(path.parent))}"


def link_fault(path: Path) -> str:
    """What is wrong with the link at a path, as a part of an error message; empty for no link."""
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return ", whose symbolic links lead in a loop"
        if path.is_symlink():
            return f", a symbolic link to {os.readlink(path)}, which is not there"
    return ""


def _files_below(folder: Path, without: Path | None) -> list[Path]:
    """Regular files below a folder, sorted by path, without hidden, third-party and our own."""
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
    """Whether `snapkv library` has made the folder, of documents that were read already."""
    try:
        with open(os.path.join(folder, "library.json"), "rb") as file:
            return b'"snapkv library ' in file.read(64)
    except OSError:
        return False


def _looks_like_html(data: bytes) -> bool:
    return data[:64].lstrip().lower().startswith((b"<!doctype html", b"<html"))


def _unicode_encoding(data: bytes) -> str | None:
    """The encoding that a byte order mark announces, or UTF-16 of Latin letters without one."""
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if data.startswith(mark):
            return encoding
    first, second = data[::2].count(0), data[1::2].count(0)
    if min(first, second) == 0 and max(first, second) > len(data) / 4:
        return "utf-16-be" if first else "utf-16-le"
    return None


def _is_binary(data: bytes) -> bool:
    return not data.startswith(b"%PDF-") and b"\0" in data and not _unicode_encoding(data)


def _decode(name: str, data: bytes, declared: str = "utf-8") -> str:
    """Text of bytes in UTF-8, in what their mark says, or in the encoding they declare."""
    if _is_binary(data):
        raise _no_text(name, data)
    encoding = _unicode_encoding(data)
    try:
        encoding = encoding or _IN_BROWSERS.get(codecs.lookup(declared).name, declared)
        return data.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        if kind_of(data) is not None:  # compressed data without a NUL byte
            raise _no_text(name, data) from error
        raise DocumentError(
            f"file: expected {encoding} text, got byte 0x{data[error.start]:02x} at offset "
            f"{error.start:,} in {name}; convert it with iconv -f WINDOWS-1252 (GB18030 if it is "
            "Chinese, WINDOWS-1251 Russian, SHIFT_JIS Japanese) -t UTF-8"
        ) from error
    except (LookupError, UnicodeError) as error:  # the codec "undefined" decodes nothing
        raise DocumentError(
            f"file: expected an encoding that Python knows, got {declared!r} declared in {name}; "
            "convert it to UTF-8"
        ) from error


def _no_text(name: str, data: bytes) -> DocumentError:
    """The error for a file that is not text, which names what it is if that is known."""
    kind = kind_of(data) or FileKind("binary data")
    remedy = kind.remedy.format(shlex.quote(name)) or (
        "pass text, Markdown, source code, HTML or PDF, or export it as PDF"
    )
    return DocumentError(f"file: expected text, got {kind.name} in {name}; {remedy}")


def _html_text(name: str, data: bytes) -> tuple[str, list[str]]:
    """What a browser would show of a page, a line per block, and why some may be missing."""
    try:
        from bs4 import dammit

        from snapkv_app.html_text import shown_text
    except ImportError as error:
        raise missing_package(f"file: reading {name}", "beautifulsoup4") from error
    declared = dammit.EncodingDetector.find_declared_encoding(data, is_html=True)
    markup = _decode(name, data, declared or "utf-8")
    text = shown_text(markup)
    if _OPENED.search(markup) and not _CLOSED.search(markup):
        return text, ["it begins with <html> and ends without </html>, so its end may be missing"]
    return text, []


def _notebook_text(name: str, data: bytes) -> str:
    """What stands in a Jupyter notebook's cells and what text they put out, no pictures."""
    text = _decode(name, data)
    try:
        cells = json.loads(text)["cells"]
        parts = ["".join(part) for cell in cells for part in _of_cell(cell)]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DocumentError(
            f"file: expected a Jupyter notebook with cells, as format 4 has them, got {name}; "
            f"export it with jupyter nbconvert --to markdown {shlex.quote(name)}"
        ) from error
    return "\n\n".join(part.strip("\n") for part in parts if part.strip())


def _of_cell(cell: dict[str, Any]) -> Iterator[str | list[str]]:
    yield cell["source"]
    for output in cell.get("outputs", ()):
        raised = ": ".join(filter(None, map(output.get, ("ename", "evalue"))))
        yield output.get("text") or output.get("data", {}).get("text/plain", raised)


def _pdf_text(name: str, data: bytes) -> tuple[str, list[str]]:
    """The text layer of a PDF, an empty line between its pages, and why some may be missing."""
    try:
        from pypdf import PdfReader
        from pypdf.errors import DependencyError, FileNotDecryptedError
    except ImportError as error:
        raise missing_package(f"file: reading {name}", "pypdf") from error
    try:
        with _noted("pypdf") as repairs:
            pages = list(PdfReader(BytesIO(data)).pages)
            texts = [page.extract_text() for page in pages]
            drawn = [
                _draws(page) for page, text in zip(pages, texts, strict=True) if not text.strip()
            ]
    except (FileNotDecryptedError, DependencyError) as error:
        raise DocumentError(
            f"file: expected a PDF without a password, got the encrypted {name}; decrypt it, for "
            f"instance with qpdf --decrypt --password=PASSWORD {shlex.quote(name)} open.pdf"
        ) from error
    except Exception as error:  # a damaged file makes pypdf raise whatever it trips over
        raise DocumentError(
            f"file: expected a complete PDF, got {name}: {error or type(error).__name__}; download "
            "or export it again"
        ) from error
    if len(drawn) == len(texts):
        raise _pdf_without_text(name, drawn)
    lost = list(_damage(data, repairs))
    if silent := sum(drawn):
        lost.append(
            f"{silent:,} of {len(texts):,} pages have images or drawings and no text; run it "
            "through OCR, for instance ocrmypdf"
        )
    return "\n\n".join(texts), lost


def _pdf_without_text(name: str, drawn: Sequence[bool]) -> DocumentError:
    """The error for a PDF without text; `drawn` says of each page whether anything is on it."""
    got, remedy = "images only", "run it through OCR, for instance ocrmypdf"
    if not any(drawn):
        got = f"{len(drawn):,} blank pages" if drawn else "no pages"
        remedy = "download or export it again, or pass another file"
    return DocumentError(f"file: expected a PDF with text, got {name} with {got}; {remedy}")


def _draws(page: Any) -> bool:
    """Whether there is anything on a page."""
    contents = page.get_contents()
    return contents is not None and bool(contents.get_data().strip())


def _damage(data: bytes, repairs: list[str]) -> Iterator[str]:
    """What is wrong with the file, by its end and by what pypdf says."""
    _, end, behind = data.rpartition(_END_OF_PDF)
    if not end or behind.strip(b"\0\t\n\f\r "):
        yield "it does not end as a PDF does, so its end may be missing"
    if repairs:
        more = f" and {len(repairs) - 1:,} more" if len(repairs) > 1 else ""
        yield f"it is damaged, and was read as far as pypdf could repair it ({repairs[0]}{more})"


@contextlib.contextmanager
def _noted(library: str) -> Iterator[list[str]]:
    """A library's warnings as a list, each once and on one line, which its log does not show."""
    lines: list[str] = []
    logger, handler = logging.getLogger(library), logging.Handler(logging.WARNING)

    def note(record: logging.LogRecord) -> bool:
        line = " ".join(record.getMessage().split())
        if line not in lines:
            lines.append(line)
        return False

    handler.addFilter(note)
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        logger.setLevel(level)
