"""The text of a PDF, and what of it may be missing: readers repair what is damaged in silence."""

import contextlib
import logging
from collections.abc import Iterator
from io import BytesIO
from typing import Any

from snapkv.errors import DocumentError, missing_package

_END = b"%%EOF"


def pdf_text(name: str, data: bytes) -> tuple[str, list[str]]:
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
            "instance with qpdf --decrypt"
        ) from error
    except Exception as error:  # a damaged file makes pypdf raise whatever it trips over
        raise DocumentError(
            f"file: expected a complete PDF, got {name}: {error or type(error).__name__}"
        ) from error
    if len(drawn) == len(texts):
        raise DocumentError(
            f"file: expected a PDF with text, got {name} with images only; run it through OCR, for "
            "instance ocrmypdf"
        )
    return "\n\n".join(texts), [*_damage(data, repairs), *_silent_pages(sum(drawn), len(texts))]


def _draws(page: Any) -> bool:
    """Whether there is anything on a page."""
    contents = page.get_contents()
    return contents is not None and bool(contents.get_data().strip())


def _damage(data: bytes, repairs: list[str]) -> Iterator[str]:
    """What is wrong with the file, by its end and by what pypdf says."""
    _, end, behind = data.rpartition(_END)
    if not end or behind.strip(b"\0\t\n\f\r "):
        yield "it does not end as a PDF does, so its end may be missing"
    if repairs:
        more = f" and {len(repairs) - 1:,} more" if len(repairs) > 1 else ""
        yield f"it is damaged, and was read as far as pypdf could repair it ({repairs[0]}{more})"


def _silent_pages(silent: int, pages: int) -> Iterator[str]:
    """Pages that show something, but have no text."""
    if silent:
        yield (
            f"{silent:,} of {pages:,} pages have images or drawings and no text; run it through "
            "OCR, for instance ocrmypdf"
        )


class _Kept(logging.Handler):
    """Keeps every message once, on one line."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        line = " ".join(record.getMessage().split())
        if line not in self._lines:
            self._lines.append(line)


@contextlib.contextmanager
def _noted(library: str) -> Iterator[list[str]]:
    """A library's warnings as a list, which its log does not show meanwhile."""
    logger, lines = logging.getLogger(library), list[str]()
    level, propagate, handler = logger.level, logger.propagate, _Kept(lines)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        logger.setLevel(level)
