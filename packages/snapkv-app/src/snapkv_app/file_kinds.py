"""Recognise the kinds of binary files by their first bytes."""

from typing import NamedTuple

_PHOTO = "Run OCR on the file, for example with tesseract"
_SOUND = "Use a transcript of the recording, for example from whisper"
_OFFICE = "Export it as PDF"


class FileKind(NamedTuple):
    """A kind of binary files, and what a user can do to get text from such a file.

    Attributes:
        name: the name of the kind, with an article.
        remedy: a sentence that says what to do, with braces in place of the quoted name of the
            file; empty if there is no special remedy.
        mime: the MIME type of a kind of documents that can be read; empty for all others.
    """

    name: str
    remedy: str = ""
    mime: str = ""


def _unpack(command: str) -> str:
    return f"Unpack the file, for example with {command}, and use the files that it contains"


_BEGINNINGS: tuple[tuple[int, bytes, FileKind], ...] = (
    (0, b"\x1f\x8b", FileKind("a gzip file", _unpack("gunzip --keep {}"))),
    (0, b"BZh", FileKind("a bzip2 file", _unpack("bunzip2 --keep {}"))),
    (0, b"\xfd7zXZ\0", FileKind("an xz file", _unpack("unxz --keep {}"))),
    (0, b"\x28\xb5\x2f\xfd", FileKind("a Zstandard file", _unpack("unzstd {}"))),
    (0, b"\x04\x22\x4d\x18", FileKind("an LZ4 file", _unpack("unlz4 {}"))),
    (0, b"7z\xbc\xaf\x27\x1c", FileKind("a 7z archive", _unpack("7z x {}"))),
    (0, b"Rar!\x1a\x07", FileKind("a RAR archive", _unpack("unrar x {}"))),
    (257, b"ustar", FileKind("a tar archive", _unpack("tar xf {}"))),
    (0, b"PK\x03\x04", FileKind("a ZIP archive", _unpack("unzip {}"))),
    (0, b"PK\x05\x06", FileKind("an empty ZIP archive")),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", FileKind("an old Office document", _OFFICE)),
    (0, b"SQLite format 3\0",
     FileKind("an SQLite database", "Export its text, for example with sqlite3 {} .dump")),
    (0, b"PAR1", FileKind("a Parquet table", "Export it as CSV")),
    (0, b"\x89HDF\r\n\x1a\n", FileKind("an HDF5 file")),
    (0, b"\x93NUMPY", FileKind("a NumPy array")),
    (0, b"GGUF", FileKind("a GGUF model", "Pass it with --model instead")),
    (0, b"\x89PNG", FileKind("a PNG image", _PHOTO)),
    (0, b"\xff\xd8\xff", FileKind("a JPEG image", _PHOTO)),
    (0, b"GIF8", FileKind("a GIF image", _PHOTO)),
    (0, b"II*\0", FileKind("a TIFF image", _PHOTO)),
    (0, b"MM\0*", FileKind("a TIFF image", _PHOTO)),
    (0, b"BM", FileKind("a BMP image", _PHOTO)),
    (8, b"WEBP", FileKind("a WebP image", _PHOTO)),
    (4, b"ftypheic", FileKind("a HEIC image", _PHOTO)),
    (4, b"ftypavif", FileKind("an AVIF image", _PHOTO)),
    (8, b"WAVE", FileKind("a WAV recording", _SOUND)),
    (0, b"ID3", FileKind("an MP3 recording", _SOUND)),
    (0, b"\xff\xfb", FileKind("an MP3 recording", _SOUND)),
    (0, b"fLaC", FileKind("a FLAC recording", _SOUND)),
    (0, b"OggS", FileKind("an Ogg recording", _SOUND)),
    (4, b"ftyp", FileKind("an MP4 recording", _SOUND)),
    (0, b"\x1aE\xdf\xa3", FileKind("a Matroska or WebM recording", _SOUND)),
    (0, b"\x7fELF", FileKind("a program")),
    (0, b"MZ", FileKind("a program for Windows")),
    (0, b"\0asm", FileKind("a WebAssembly program")),
)  # fmt: skip

_OOXML = "application/vnd.openxmlformats-officedocument."
_ODF = "application/vnd.oasis.opendocument."

_IN_ZIP: tuple[tuple[str, str, FileKind], ...] = (
    ("word/document.xml", ".docx",
     FileKind("a Word document", mime=_OOXML + "wordprocessingml.document")),
    ("xl/workbook.xml", ".xlsx",
     FileKind("an Excel workbook", mime=_OOXML + "spreadsheetml.sheet")),
    ("ppt/presentation.xml", ".pptx",
     FileKind("a PowerPoint presentation", mime=_OOXML + "presentationml.presentation")),
    (_ODF + "text", ".odt", FileKind("an OpenDocument text", mime=_ODF + "text")),
    (_ODF + "spreadsheet", ".ods",
     FileKind("an OpenDocument spreadsheet", mime=_ODF + "spreadsheet")),
    (_ODF + "presentation", ".odp",
     FileKind("an OpenDocument presentation", mime=_ODF + "presentation")),
    (_ODF, ".odg", FileKind("an OpenDocument file", _OFFICE)),
    ("application/epub+zip", ".epub", FileKind("an EPUB book", mime="application/epub+zip")),
)  # fmt: skip
"""What a ZIP archive is, by a name or the beginning of a file in it, or by its own suffix."""


def kind_of(data: bytes, suffix: str = "") -> FileKind | None:
    """Return the kind of a binary file; None if it is unknown.

    The caller must know that the file is not text, because a text may begin with the same bytes.

    Args:
        data: the content of the file.
        suffix: the suffix of its name in lower case with its dot, which decides about a ZIP archive
            that does not contain the usual names of a document; ignored for other files.
    """
    for start, letters, kind in _BEGINNINGS:
        if data.startswith(letters, start):
            held = (each for name, own, each in _IN_ZIP if name.encode() in data or own == suffix)
            return next(held, kind) if letters.startswith(b"PK") else kind
    return None
