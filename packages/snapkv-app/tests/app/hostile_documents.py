"""Files that a stranger could send to exhaust the reader: each small, and large when it is read."""

import io
import json
import zipfile
import zlib
from functools import partial

GIGABYTE = 2**30
ZEROS = b" " * 2**20

_WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_SHEET = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_OFFICE = "urn:oasis:names:tc:opendocument:xmlns:"
_ODF = (
    f'<office:document-content xmlns:office="{_OFFICE}office:1.0" '
    f'xmlns:text="{_OFFICE}text:1.0" xmlns:table="{_OFFICE}table:1.0"><office:body>'
)
_ODF_END = "</office:body></office:document-content>"


def archive(parts, *, compression=zipfile.ZIP_DEFLATED):
    """A ZIP archive of these texts, or of chunks of bytes, by their names."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", compression, compresslevel=1) as book:
        for name, content in parts.items():
            with book.open(name, "w", force_zip64=True) as part:
                for chunk in [content.encode()] if isinstance(content, str) else content:
                    part.write(chunk)
    return made.getvalue()


def word(body, **parts):
    """A Word document with this body, as text or as chunks of bytes."""
    begin, end = f'<w:document xmlns:w="{_WORD}"><w:body>', "</w:body></w:document>"
    return archive({"word/document.xml": framed(begin, body, end), **parts})


SHEETS = ("a", "/*", "@media", "@media{", "{", "}", ".a,", "p{display:none}")
"""What a style sheet can repeat so that a pattern begins to search at every place."""


def styled(part):
    return f"<html><style>{part * 200_000}</style><p>word</p></html>".encode()


def framed(begin, body, end):
    """The chunks of a text around a body, which is a text or chunks."""
    yield begin.encode()
    yield from [body.encode()] if isinstance(body, str) else body
    yield end.encode()


def workbook(rows, begin=""):
    """An Excel workbook of one sheet with these rows."""
    relations = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    package = "http://schemas.openxmlformats.org/package/2006/relationships"
    return archive(
        {
            "_rels/.rels": f'<Relationships xmlns="{package}"><Relationship Id="r1" '
            f'Type="{relations}/officeDocument" Target="xl/workbook.xml"/></Relationships>',
            "xl/workbook.xml": f'<workbook xmlns="{_SHEET}" xmlns:r="{relations}"><sheets>'
            '<sheet name="A" sheetId="1" r:id="r1"/></sheets></workbook>',
            "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{package}"><Relationship '
            f'Id="r1" Type="{relations}/worksheet" Target="worksheets/sheet1.xml"/>'
            "</Relationships>",
            "xl/worksheets/sheet1.xml": framed(
                f'{begin}<worksheet xmlns="{_SHEET}"><sheetData>', rows, "</sheetData></worksheet>"
            ),
        }
    )


def open_document(kind, body, begin=""):
    """An OpenDocument file of a kind ("text" or "spreadsheet") with this body."""
    begin += _ODF + f"<office:{kind}>"
    end = f"</office:{kind}>" + _ODF_END
    return archive(
        {
            "mimetype": f"application/vnd.oasis.opendocument.{kind}",
            "META-INF/manifest.xml": '<manifest:manifest xmlns:manifest="'
            f'{_OFFICE}manifest:1.0"><manifest:file-entry manifest:full-path="/" '
            f'manifest:media-type="application/vnd.oasis.opendocument.{kind}"/>'
            "</manifest:manifest>",
            "content.xml": framed(begin, body, end),
        }
    )


def epub(chapter, container='<a><rootfile full-path="book.opf"/></a>'):
    """An EPUB book of one chapter, as text or as chunks of bytes."""
    return archive(
        {
            "mimetype": "application/epub+zip",
            "META-INF/container.xml": container,
            "book.opf": '<a><item id="i" href="a.xhtml"/><itemref idref="i"/></a>',
            "a.xhtml": chapter,
        }
    )


def spaces(size):
    """Chunks of `size` bytes of blank text, which compress a thousandfold."""
    return (ZEROS for _ in range(size // len(ZEROS)))


def multiplied(root="a", text="&e9;"):
    """The declarations of XML entities that multiply to a hundred gigabytes."""
    entities = "".join(f'<!ENTITY e{n + 1} "{f"&e{n};" * 10}">' for n in range(9))
    return f'<!DOCTYPE {root} [<!ENTITY e0 "{"A" * 100}">{entities}]>'


def paragraphs(count):
    """Chunks of Word paragraphs, `count` of them."""
    chunk = b"<w:p><w:r><w:t>word</w:t></w:r></w:p>" * 10_000
    return (chunk for _ in range(count // 10_000))


def repeated(columns, rows):
    """A table of OpenDocument with one cell that stands for many."""
    return (
        f'<table:table table:name="A"><table:table-row table:number-rows-repeated="{rows}">'
        f'<table:table-cell table:number-columns-repeated="{columns}" '
        'office:value-type="string"><text:p>word</text:p></table:table-cell>'
        "</table:table-row></table:table>"
    )


def pdf(*objects):
    """A PDF of these objects, as bytes; the first is the catalogue."""
    made, places = bytearray(b"%PDF-1.7\n"), []
    for number, content in enumerate(objects, 1):
        places.append(len(made))
        made += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    start = len(made)
    made += b"xref\n0 %d\n0000000000 65535 f \n" % (len(places) + 1)
    made += b"".join(b"%010d 00000 n \n" % place for place in places)
    made += b"trailer <</Size %d /Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (len(places) + 1, start)
    return bytes(made)


def pdf_of_pages(
    count, stream=b"<</Length 35>>stream\nBT /F1 12 Tf 20 200 Td (word) Tj ET\nendstream"
):
    """A PDF that refers to one page many times."""
    return pdf(
        b"<</Type /Catalog /Pages 2 0 R>>",
        b"<</Type /Pages /Count %d /Kids [%s]>>" % (count, b"3 0 R " * count),
        b"<</Type /Page /Parent 2 0 R /MediaBox [0 0 300 300] /Contents 4 0 R "
        b"/Resources <</Font <</F1 5 0 R>>>>>>",
        stream,
        b"<</Type /Font /Subtype /Type1 /BaseFont /Helvetica>>",
    )


def deflated(chunks):
    """A stream of a PDF that unpacks to these chunks."""
    packer = zlib.compressobj(1)
    data = b"".join(map(packer.compress, chunks)) + packer.flush()
    return b"<</Length %d /Filter /FlateDecode>>stream\n%s\nendstream" % (len(data), data)


def twice_deflated(size):
    """A stream of a PDF of a few kilobytes that unpacks to `size` bytes."""
    inner, outer = zlib.compressobj(9), zlib.compressobj(9)
    data = b"".join(outer.compress(inner.compress(chunk)) for chunk in spaces(size))
    data += outer.compress(inner.flush()) + outer.flush()
    return b"<</Length %d /Filter [/FlateDecode /FlateDecode]>>stream\n%s\nendstream" % (
        len(data),
        data,
    )


def nested_mail(depth):
    """An e-mail of `depth` parts in each other."""
    heads = (
        f'Content-Type: multipart/mixed; boundary="b{level}"\n\n--b{level}\n'
        for level in range(depth)
    )
    return ("".join(heads) + "Content-Type: text/plain\n\nword\n").encode()


def notebook(output):
    """A notebook with this text as output of its only cell."""
    cell = {"cell_type": "code", "source": "x", "outputs": [{"text": output}]}
    return json.dumps({"nbformat": 4, "cells": [cell]}).encode()


def declared(encoding):
    """A page that declares an encoding, with letters that take long in some."""
    return b'<meta charset="%s">word' % encoding.encode() + b"a-" + b"z9" * 1_000_000


ENCODINGS = ("base64", "cp037", "hex", "idna", "punycode", "quopri", "rot13", "utf-7", "zip")
"""Encodings of Python that no page is in."""

FILES = {
    "docx-bomb.docx": lambda: word(spaces(GIGABYTE)),
    "docx-paragraphs.docx": lambda: word(paragraphs(10_000_000)),
    "docx-entries.docx": lambda: word("", **{f"word/{n}.xml": "<a/>" for n in range(20_000)}),
    "docx-deep.docx": lambda: word("<w:p>" * 100_000 + "</w:p>" * 100_000),
    "docx-entities.docx": lambda: archive({"word/document.xml": multiplied() + "<a>&e9;</a>"}),
    "xlsx-bomb.xlsx": lambda: workbook(spaces(GIGABYTE)),
    "xlsx-rows.xlsx": lambda: workbook(
        b'<row><c t="inlineStr"><is><t>word</t></is></c></row>' * 10_000 for _ in range(1000)
    ),
    "xlsx-corner.xlsx": lambda: workbook('<row r="1048576"><c r="XFD1048576"><v>1</v></c></row>'),
    "xlsx-corners.xlsx": lambda: workbook(
        '<row r="1"><c r="A1"><v>1</v></c></row>'
        '<row r="1048576"><c r="XFD1048576"><v>1</v></c></row>'
    ),
    "odt-bomb.odt": lambda: open_document("text", spaces(GIGABYTE)),
    "odt-entities.odt": lambda: open_document("text", "<text:p>&e9;</text:p>", multiplied()),
    "odt-spaces.odt": lambda: open_document(
        "text", '<text:p>word<text:s text:c="2000000000"/></text:p>'
    ),
    "ods-columns.ods": lambda: open_document("spreadsheet", repeated(1_000_000, 1)),
    "ods-rows.ods": lambda: open_document("spreadsheet", repeated(1, 1_000_000)),
    "ods-both.ods": lambda: open_document("spreadsheet", repeated(1_000_000, 1_000_000)),
    "epub-bomb.epub": lambda: epub(spaces(GIGABYTE)),
    "epub-entities.epub": lambda: epub("a", multiplied() + "<a>&e9;</a>"),
    "pdf-bomb.pdf": lambda: pdf_of_pages(1, deflated(spaces(GIGABYTE))),
    "pdf-bomb-twice.pdf": lambda: pdf_of_pages(1, twice_deflated(GIGABYTE)),
    "pdf-pages.pdf": lambda: pdf_of_pages(1_000_000),
    "pdf-bomb-letters.pdf": lambda: pdf_of_pages(
        1, deflated([b"BT /F1 12 Tf ", *[b"(word) Tj " * 100_000] * 100, b" ET"])
    ),
    "html-deep.html": lambda: b"<div>word" * 1_000_000,
    "html-tables.html": lambda: b"<table><tr><td>word" * 300_000,
    "html-attributes.html": lambda: b"<p " + b"a=1 " * 1_000_000 + b">word",
    "html-doctype.html": lambda: b"<!doctype html" + b"<!--" * 1_000_000,
    **{f"html-style-{place}.html": partial(styled, part) for place, part in enumerate(SHEETS)},
    "xlsx-tags.xlsx": lambda: workbook("<row " * 1_000_000),
    "json-deep.ipynb": lambda: b'{"cells": ' + b"[" * 5_000_000,
    "json-deep.json": lambda: b"[" * 5_000_000,
    "json-escapes.json": lambda: b"\\u00e1" * 5_000_000,
    "rtf-deep.rtf": lambda: b"{\\rtf1 word" + b"{" * 5_000_000,
    "rtf-bin.rtf": lambda: b"{\\rtf1 word\\bin2000000000 " + b"a" * 1000 + b"}",
    "svg-entities.svg": lambda: (multiplied() + "<svg>&e9;</svg>").encode(),
    "xml-entities.xml": lambda: (multiplied() + "<a>&e9;</a>").encode(),
    "mail-nested.eml": lambda: nested_mail(1_000),
    "mail-deep.eml": lambda: nested_mail(20_000),
    "mail-headers.eml": lambda: b"To: " + b"a@b.example, " * 500_000 + b"\n\nword",
    "mail-words.eml": lambda: b"Subject: " + b"=?utf-8?q?a?= " * 500_000 + b"\n\nword",
    **{f"encoding-{name}.html": partial(declared, name) for name in ENCODINGS},
    "mail-punycode.eml": lambda: (
        b"Content-Type: text/plain; charset=punycode\n\n" + b"a-" + b"z9" * 1_000_000
    ),
    "mail-idna.eml": lambda: (
        b"Content-Type: text/plain; charset=idna\n\n" + b"xn--" + b"z9" * 1_000_000
    ),
    "book-output.ipynb": lambda: notebook("word " * 20_000_000),
    "nul.txt": lambda: b"word\0" * 10_000_000,
    "nul.html": lambda: b"<html>word\0" * 1_000_000,
}
