"""Decode the bytes of a file: find their encoding, and refuse bytes that are not text."""

import codecs
import re
import shlex

from snapkv.errors import DocumentError, SnapKVError, wrong
from snapkv_app.file_kinds import FileKind, kind_of

# The longer mark comes first, because that of UTF-32 begins with that of UTF-16.
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
"""The encoding that browsers use for each encoding that a page may declare, by Python's names.

The Encoding Standard says so, because pages declare a part of the encoding that they are in.
"""

_NOT_OF_FILES = ("idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape", "utf-7")
"""Python's text encodings that are for host names or literals, or that browsers refuse.

Punycode and IDNA also take a time that grows with the square of the length.
"""

_DECLARED = re.compile(
    rb"""<\?xml[^>]{,200}?encoding\s*=\s*["']([\w.:-]+)|<meta[^>]{,400}?charset\s*=\s*["']?([\w.:-]+)""",
    re.IGNORECASE,
)
_SHIFTED = {
    "iso2022_kr": re.compile(rb"\x1b\$\)C"),
    "iso2022_jp_2": re.compile(rb"\x1b\$[@AB(]"),
}
"""The escape sequences by which texts in seven bits switch to Korean, Japanese or Chinese."""


def decode(name: str, data: bytes) -> str:
    """Decode the content of a text file, and turn its line ends into those of Unix.

    The encoding is the one that a byte order mark, an XML declaration, a `<meta>` tag or an escape
    sequence announces. Without any of them it is UTF-8.

    Args:
        name: the name of the file, for error messages.
        data: the content of the file.

    Raises:
        DocumentError: `data` is binary or is not in that encoding, or no text file is in that
            encoding.
    """
    if is_binary(data):
        raise not_text(name, data)
    declared, encoding = _declared_encoding(data), _unicode_encoding(data)
    try:
        encoding = encoding or encoding_in_browsers(name, declared)
        return data.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        if kind_of(data) is not None:  # compressed data without a NUL byte
            raise not_text(name, data) from error
        raise refused(
            f"expected {encoding} text, but got byte 0x{data[error.start]:02x} at offset "
            f"{error.start:,} in {name}",
            "Convert it with iconv -f WINDOWS-1252 (GB18030 if it is Chinese, WINDOWS-1251 "
            "Russian, SHIFT_JIS Japanese) -t UTF-8",
        ) from error


def encoding_in_browsers(name: str, declared: str) -> str:
    """Return the encoding that browsers use for one that a file declares.

    Args:
        name: the name of the file, for error messages.
        declared: the encoding that it declares.

    Raises:
        DocumentError: Python does not know the encoding, or no file that declares it in ASCII can
            be in it.
    """
    try:
        python_name = codecs.lookup(declared).name
        encoding = _IN_BROWSERS.get(python_name, declared)
        if python_name in _NOT_OF_FILES or "<".encode(encoding) != b"<":
            raise LookupError(declared)
    except LookupError as error:
        raise refused(
            f"{name} declares {declared!r}, which is not a known encoding of text",
            "Convert the file to UTF-8",
        ) from error
    return encoding


def is_binary(data: bytes) -> bool:
    """Return whether `data` contains zero bytes, and is neither a PDF nor text in UTF-16."""
    return not data.startswith(b"%PDF-") and b"\0" in data and not _unicode_encoding(data)


def refused(problem: str, remedy: str) -> SnapKVError:
    """Build the `DocumentError` for a file that cannot be read, as `wrong` does."""
    return wrong("file", problem, remedy, DocumentError)


def not_text(name: str, data: bytes) -> SnapKVError:
    """Build the `DocumentError` for a file that is not text; it names the kind of the file."""
    kind = kind_of(data) or FileKind("binary data")
    remedy = kind.remedy.format(shlex.quote(name)) or (
        "Pass text, Markdown, source code, HTML, PDF or an Office document, or export it as PDF"
    )
    return refused(f"expected text, but got {kind.name} in {name}", remedy)


def _declared_encoding(data: bytes) -> str:
    """Return the encoding that a text declares in its markup or by escape sequences, or UTF-8.

    Only markup in the first 1,024 bytes counts, if the text begins with `<`. Its encoding is
    returned as it is written there, so Python may not know it.
    """
    begun = data[:1024].lstrip()
    if begun[:1] == b"<" and (found := _DECLARED.search(begun)):
        return (found[1] or found[2]).decode("ascii", "replace")
    return next((name for name, shift in _SHIFTED.items() if shift.search(data)), "utf-8")


def _unicode_encoding(data: bytes) -> str | None:
    """Return the encoding of Unicode that a byte order mark announces.

    Without a mark, a text is UTF-16 if most of every second byte are zero.

    Returns:
        The encoding by Python's name; None if it is none of these.
    """
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if data.startswith(mark):
            return encoding
    first, second = data[::2].count(0), data[1::2].count(0)
    if min(first, second) == 0 and max(first, second) > len(data) / 4:
        return "utf-16-be" if first else "utf-16-le"
    return None
