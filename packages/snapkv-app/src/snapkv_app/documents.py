"""Read documents: HTML, PDF, e-mails, notebooks, EPUB and the files of Office programs.

The libraries for it are written in C and Rust, and documents come from strangers, so
`document_process` runs this module in a process of its own. Each library is imported when it is
needed.
"""

import codecs
import json
import posixpath
import re
import shlex
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple
from urllib.parse import unquote

from snapkv.errors import DocumentError, SnapKVError
from snapkv_app.decoding import decode, encoding_in_browsers, refused
from snapkv_app.hidden_text import remove_hidden_elements, remove_hidden_text, unpack

_AGAIN = "Download or export the file again"


class Reading(NamedTuple):
    """The text of a document.

    Attributes:
        text: what the document shows.
        losses: a clause for each part of the document that is not in `text`.
    """

    text: str
    losses: list[str]


def read_document(form: str, name: str, data: bytes) -> Reading:
    """Read a document; the text of any but a PDF may be empty.

    Args:
        form: a key of `READERS`, or the MIME type of an Office document.
        name: the name of the file, for error messages.
        data: the content of the file.

    Raises:
        DocumentError: the document is damaged or encrypted, or is a PDF without text.
        ModuleNotFoundError: the library that reads this form is not installed.
        MemoryError: the process may not take as much memory as the document needs.
    """
    reader = READERS.get(form)
    try:
        return reader(name, data) if reader else _read_office(name, data, form)
    except (DocumentError, ModuleNotFoundError, MemoryError):
        raise
    except Exception as error:  # a damaged file makes the libraries raise whatever they trip over
        raise _damaged(name, error) from error


def _damaged(name: str, error: Exception) -> SnapKVError:
    """Build the `DocumentError` for a document at which a library has failed with `error`."""
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return refused(f"expected a complete document, but got {name}: {reason}", _AGAIN)


# HTML.

_OPENED = re.compile(r"<html[\s>]", re.IGNORECASE)
_CLOSED = re.compile(r"</html\s*>", re.IGNORECASE)
_BLANK_LINES = re.compile(r"(?<![ \t])[ \t]*\n\s*\n")
"""Lines without letters; the spaces in front are looked at once, from their first on."""

_STYLED = "its style sheet hides text, which is not read"
_BLOCKS = (
    "caption center dd details dialog dl dt fieldset form head hr legend menu optgroup option "
    "search section summary table textarea title tr"
)
"""The tags that begin a line, beside those that inscriptis knows."""


def _read_html(name: str, data: bytes) -> Reading:
    markup = decode(name, data)
    text, losses = _shown_text(markup)
    if _OPENED.search(markup) and not _CLOSED.search(markup):
        losses.append("it begins with <html> and ends without </html>, so its end may be missing")
    return Reading(text, losses)


def _shown_text(markup: str) -> Reading:
    """Return the text of a web page that a browser would show.

    Every block begins a line, and a tab ends every cell of a table.

    Raises:
        ValueError: tags are nested more than 2,048 deep.
    """
    from inscriptis.css_profiles import STRICT_CSS_PROFILE
    from inscriptis.html_engine import Inscriptis
    from inscriptis.html_properties import Display
    from inscriptis.model.config import ParserConfig
    from inscriptis.model.html_element import HtmlElement
    from inscriptis.model.tag import CustomHtmlTagHandlerMapping
    from lxml import etree, html

    # huge_tree allows 2,048 nested tags instead of 256.
    parser = html.HTMLParser(
        encoding="utf-8", huge_tree=True, remove_comments=True, remove_pis=True
    )
    # lxml would refuse an empty page, and a text whose XML declaration names an encoding.
    page = html.document_fromstring(f"<html>{markup}".encode(), parser=parser)
    if any(entry.level == etree.ErrorLevels.FATAL for entry in parser.error_log):
        raise ValueError("the tags of the document are nested more than 2,048 levels deep")
    losses = [_STYLED] if remove_hidden_elements(page) else []
    # inscriptis would draw tables with spaces, as wide as their longest cell in every line.
    cells = CustomHtmlTagHandlerMapping(
        start_tag_mapping={**dict.fromkeys(("table", "tr", "td", "th")), "ol": _start_list},
        end_tag_mapping={"table": None, "td": _end_cell, "th": _end_cell},
    )
    blocks = dict.fromkeys(_BLOCKS.split(), HtmlElement(display=Display.block))
    config = ParserConfig(css=STRICT_CSS_PROFILE | blocks, custom_html_tag_handler_mapping=cells)
    text = Inscriptis(page, config).get_text()
    return Reading(_BLANK_LINES.sub("\n\n", text.replace("\t\n", "\n")).strip(), losses)


def _start_list(state: Any, attributes: Any) -> None:
    start = attributes.get("start", "")
    state.li_counter.append(int(start) if start.isdecimal() else 1)


def _end_cell(state: Any) -> None:
    state.tags[-1].write_verbatim_text("\t")


# PDF.

_MOST_PAGES = 50_000
_OCR = "run OCR on the file, for example with ocrmypdf"


def _read_pdf(name: str, data: bytes) -> Reading:
    """Read the text of a PDF and of its filled-in forms, with an empty line between two pages.

    Raises:
        DocumentError: the PDF is encrypted, has too many pages or no text, or its fonts do not say
            which letters most of its text consists of.
    """
    import pypdfium2
    from pypdfium2 import raw

    try:
        pdf = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if error.err_code == raw.FPDF_ERR_PASSWORD:
            command = f"qpdf --decrypt --password=PASSWORD {shlex.quote(name)} open.pdf"
            raise refused(
                f"{name} is encrypted and cannot be read without a password",
                f"Decrypt the file, for example with {command}",
            ) from error
        raise
    if len(pdf) > _MOST_PAGES:
        raise refused(
            f"expected at most {_MOST_PAGES:,} pages, but got {len(pdf):,} in {name}",
            "Split the file, for example with qpdf, and use a part of it",
        )
    pdf.init_forms()
    pages = [_read_page(pdf, number) for number in range(len(pdf))]
    counts = sum((counts for _, counts in pages), Counter[str]())
    if counts["letters"] == 0 or 2 * counts["unmapped"] > counts["letters"]:
        raise _pdf_without_text(name, len(pages), counts)
    losses = list(_losses_of_pdf(data, len(pages), counts))
    if pdf.get_formtype() in (raw.FORMTYPE_XFA_FULL, raw.FORMTYPE_XFA_FOREGROUND):
        losses.append("it is an XFA form, whose fields are not read; print it into a PDF")
    return Reading("\n\n".join(text for text, _ in pages), losses)


def _read_page(pdf: Any, number: int) -> tuple[str, Counter[str]]:
    """Read a page of a PDF.

    Returns:
        The text, and counts: the number of "letters"; the number of "unmapped" characters, for
        which the font does not say which letter they show; 1 for "drawn" if the page shows
        something but has no text; and 1 for "broken" if the page cannot be read.
    """
    import pypdfium2
    from pypdfium2 import raw

    try:
        raw.FPDFPage_Flatten(pdf[number], raw.FLAT_NORMALDISPLAY)  # fields become text of the page
        page = pdf[number]
        letters = page.get_textpage()
    except pypdfium2.PdfiumError:
        return "", Counter(broken=1)
    # PDFium writes a hyphen that ends a line as U+FFFE, without the line's end.
    text = letters.get_text_range().replace("\ufffe", "-\n").replace("\r\n", "\n")
    drawn = not text.strip() and raw.FPDFPage_CountObjects(page) > 0
    unmapped = sum(
        raw.FPDFText_HasUnicodeMapError(letters, index) == 1
        for index in range(letters.count_chars())
    )
    return text, Counter(letters=len("".join(text.split())), unmapped=unmapped, drawn=drawn)


def _pdf_without_text(name: str, pages: int, counts: Counter[str]) -> SnapKVError:
    """Build the `DocumentError` that says why a PDF has no readable text."""
    remedy = f"R{_OCR[1:]}"
    if counts["letters"]:
        problem = "fonts that do not say which letters they show"
    elif counts["drawn"]:
        problem = "images only"
    elif counts["broken"] or not pages:
        problem, remedy = "no pages that can be read", _AGAIN
    else:
        problem, remedy = f"{pages:,} blank pages", f"{_AGAIN}, or pass another file"
    return refused(f"expected a PDF with text, but got {name} with {problem}", remedy)


def _losses_of_pdf(data: bytes, pages: int, counts: Counter[str]) -> Iterator[str]:
    """Yield a clause for everything that is missing from the text of a PDF."""
    _, end, behind = data.rpartition(b"%%EOF")
    if not end or behind.strip(b"\0\t\n\f\r "):
        yield "it does not end as a PDF does, so its end may be missing"
    elif not _is_table_found(data):
        yield "it is damaged, and was read as far as PDFium could repair it"
    if counts["drawn"]:
        yield f"{counts['drawn']:,} of {pages:,} pages have images or drawings and no text; {_OCR}"
    if counts["broken"]:
        yield f"{counts['broken']:,} of {pages:,} pages cannot be read"
    if 100 * counts["unmapped"] > counts["letters"]:
        yield (
            f"for {counts['unmapped']:,} of {counts['letters']:,} characters the fonts do not say "
            f"which letters they show; {_OCR}"
        )


def _is_table_found(data: bytes) -> bool:
    """Return whether a PDF has its table of objects at the offset that its end names."""
    starts = re.findall(rb"startxref\s+(\d+)", data)
    start = data.find(b"%PDF-") + int(starts[-1]) if starts else len(data)
    return re.match(rb"\s*(xref|\d+\s+\d+\s+obj)", data[start : start + 64]) is not None


# E-mails and saved web pages.

_MOST_MULTIPARTS = 100
"""Python compares every line of an e-mail with the ends of all parts around it."""

_MOST_OF_FIELD = 2**16
"""The most characters of a field; the time for reading one grows with the square of its length."""

_PRINT = "Export it as text or PDF"


def _read_mail(name: str, data: bytes) -> Reading:
    """Read the head and the body of an e-mail, or a saved web page, which has the same format.

    Raises:
        DocumentError: it has more parts in each other, or a longer field, than Python reads in a
            few seconds, or its text is in an encoding that no text is in.
    """
    import email.policy

    if data.lower().count(b"boundary=") > _MOST_MULTIPARTS:
        raise refused(
            f"expected at most {_MOST_MULTIPARTS} multiparts, but got more in {name}", _PRINT
        )
    data = data.removeprefix(codecs.BOM_UTF8).lstrip()  # else the fields were part of the body
    message = email.message_from_bytes(data, policy=email.policy.default)
    fields = (len(value) for part in message.walk() for _, value in part.raw_items())
    if max(fields, default=0) > _MOST_OF_FIELD:
        raise refused(
            f"expected fields of at most {_MOST_OF_FIELD:,} characters, but got more in {name}",
            _PRINT,
        )
    head = [
        f"{key}: {message[key]}" for key in ("Subject", "From", "To", "Cc", "Date") if message[key]
    ]
    body = message.get_body(("html", "plain"))
    text, losses = "", list[str]()
    if body is not None:  # a part without fields is false
        text = _decode_body(name, body)
        if body.get_content_subtype() == "html":
            text, losses = _shown_text(text)
    is_page = message.get_content_type() == "multipart/related"  # its parts are pictures and styles
    is_file = body is None and not message.is_multipart()
    others = dict.fromkeys([message] if is_file else [] if is_page else message.iter_attachments())
    others |= dict.fromkeys(part for part in message.walk() if part.is_attachment())
    names = ", ".join(part.get_filename() or part.get_content_type() for part in others)
    if names:
        losses.append(f"it has attachments, which are not read ({names})")
    return Reading("\n".join(head) + "\n\n" + text, losses)


def _decode_body(name: str, body: Any) -> str:
    """Decode the body of an e-mail, as a text file if it declares ASCII or no encoding.

    Raises:
        DocumentError: the body is not in UTF-8 and declares no other encoding, or it declares one
            that no text is in.
    """
    declared: str = body.get_content_charset("ascii")
    encoding = encoding_in_browsers(name, declared)
    data: bytes = body.get_payload(decode=True)
    if codecs.lookup(declared).name == "ascii":
        return decode(name, data)
    # Browsers read UTF-8 where a page declares UTF-16 in ASCII, but an e-mail can be in UTF-16.
    return data.decode(declared if encoding == "utf-8" else encoding, "replace")


# Notebooks.


def _read_notebook(name: str, data: bytes) -> Reading:
    """Read the cells of a Jupyter notebook and the text of their outputs, without pictures.

    Raises:
        DocumentError: the file is not a notebook in format 4.
    """
    text = decode(name, data)
    try:
        cells = json.loads(text)["cells"]
        parts = ["".join(part) for cell in cells for part in _parts_of(cell)]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise refused(
            f"expected a Jupyter notebook with format 4, but got {name}",
            f"Export it with jupyter nbconvert --to markdown {shlex.quote(name)}",
        ) from error
    return Reading("\n\n".join(part.strip("\n") for part in parts if part.strip()), [])


def _parts_of(cell: dict[str, Any]) -> Iterator[str | list[str]]:
    """Yield the source of a cell and the text of each of its outputs."""
    yield cell["source"]
    for output in cell.get("outputs", ()):
        raised = ": ".join(filter(None, map(output.get, ("ename", "evalue"))))
        shown = output.get("data", {})
        page = "".join(shown.get("text/html", ()))
        # A page may be a program only, and its plain text only the name of a class.
        yield (
            output.get("text")
            or shown.get("text/markdown")
            or (page and _shown_text(page).text)
            or shown.get("text/plain", raised)
        )


# EPUB.


def _read_epub(name: str, data: bytes) -> Reading:
    """Read the chapters of an EPUB book in their order, with an empty line between two of them.

    Raises:
        DocumentError: a chapter is not text. Other damage raises whatever the libraries raise.
    """
    from lxml import etree

    with zipfile.ZipFile(BytesIO(data)) as book:
        (begin,) = unpack(name, book, ["META-INF/container.xml"])
        (place, *_) = etree.fromstring(begin).xpath("//@full-path")
        package = etree.fromstring(*unpack(name, book, [place]))
        files = {item.get("id"): item.get("href") for item in package.iter("{*}item")}
        folder = posixpath.dirname(place)
        chapters = (files[chapter.get("idref")] for chapter in package.iter("{*}itemref"))
        paths = [posixpath.normpath(posixpath.join(folder, unquote(each))) for each in chapters]
        pages = [_shown_text(decode(name, page)) for page in unpack(name, book, paths)]
    losses = {loss: None for page in pages for loss in page.losses}
    return Reading("\n\n".join(page.text for page in pages), [*losses])


# Files of Office programs.


def _read_office(name: str, data: bytes, mime: str) -> Reading:
    """Read a document of an Office program, including its notes, headers and footers.

    A tab separates the cells of a table.

    Args:
        name: the name of the file, for error messages.
        data: the content of the file.
        mime: the MIME type of the document.
    """
    import asyncio

    import xberg

    data, hidden = remove_hidden_text(name, data)
    config = xberg.ExtractionConfig(
        use_cache=False,
        disable_ocr=True,
        enable_quality_processing=False,  # it would rewrite the text
        include_document_structure=True,
        output_format="plain",  # in others the notes of slides are missing
    )
    source = xberg.ExtractInput(kind="bytes", bytes=data, mime_type=mime)
    (result,) = asyncio.run(xberg.extract(source, config)).results
    losses = [warning.message for warning in result.processing_warnings] + hidden
    return Reading("\n".join(_lines_of(result.document.nodes)), losses)


def _lines_of(nodes: Sequence[Any]) -> Iterator[str]:
    """Yield the lines of a document of xberg: paragraphs, list items with marks, and table rows."""
    contents = [json.loads(str(node.content)) for node in nodes]
    depths, numbers = dict[int | None, int](), Counter[int]()
    for place, content in enumerate(contents):
        kind, parent = content["node_type"], nodes[place].parent
        depths[place] = depths.get(parent, 0) + (kind == "list")
        if kind == "list_item":
            numbers[parent] += 1
            mark = f"{numbers[parent]}." if contents[parent]["ordered"] else "-"
            yield f"{'   ' * depths[place]}{mark} {content['text']}"
        elif kind == "table":
            for _, row in groupby(content["grid"]["cells"], key=itemgetter("row")):
                yield "\t".join(" ".join(cell["content"].split()) for cell in row)
        elif text := content.get("text") or content.get("content"):
            yield text


READERS = {
    "pdf": _read_pdf,
    "html": _read_html,
    "mail": _read_mail,
    "notebook": _read_notebook,
    "application/epub+zip": _read_epub,
}
"""The reader of each form of documents, beside those of Office programs."""
