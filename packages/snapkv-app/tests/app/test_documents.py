"""Reading documents that well-known programs write, and those that strangers could send."""

import base64
import json
import threading
import zipfile
from email.message import EmailMessage

import pytest
from docx import Document
from docx.enum.style import WD_STYLE_TYPE
from docx.oxml import OxmlElement
from openpyxl import Workbook
from openpyxl.comments import Comment
from pptx import Presentation
from pptx.util import Cm
from pypdf import PdfWriter
from pypdf.generic import ArrayObject, DecodedStreamObject, FloatObject, NumberObject
from pypdf.generic import TextStringObject as Letters

from snapkv.errors import DocumentError
from snapkv_app import document_process, documents, text_files
from snapkv_app.hidden_text import _NOT_COMPUTED
from tests.app.hostile_documents import open_document
from tests.app.test_text_files import named, noted, write_pdf


def saved(folder, name, content):
    """The path of a file with this content."""
    data = content if isinstance(content, bytes) else content.encode()
    (folder / name).write_bytes(data)
    return folder / name


def shown(folder, name, content):
    """The text of a file with this content, of which nothing is lost."""
    text, lines = noted(saved(folder, name, content))
    assert lines == []
    return text


# HTML.

BLOCKS = (
    "address article aside blockquote caption center dd details dialog div dl dt fieldset "
    "figcaption figure footer form h1 h6 header hgroup legend main menu nav option p pre search "
    "section summary textarea"
)


@pytest.mark.parametrize(
    "hidden",
    [
        "<p style='display:none'>INJECTED</p>",
        "<span style='color:red; Visibility: Hidden'>INJECTED</span>",
        "<p style='opacity:0'>INJECTED</p>",
        "<div style='font-size: 0px'>INJECTED</div>",
        "<p hidden>INJECTED</p>",
        "<template>INJECTED</template>",
        "<noscript>INJECTED</noscript>",
        "<script>INJECTED</script>",
        "<!-- INJECTED -->",
        "<?php INJECTED ?>",
        "<math><mi>x</mi><annotation encoding='application/x-tex'>INJECTED</annotation></math>",
    ],
)
def test_hidden_text_of_a_page_is_skipped(tmp_path, hidden):
    page = f"<html><body><p>Nine</p>{hidden} after</body></html>"
    text = shown(tmp_path, "page.html", page)
    assert "INJECTED" not in text
    assert text.split()[0] == "Nine"
    assert text.split()[-1] == "after"


@pytest.mark.parametrize(
    ("sheet", "start"),
    [
        (".a {display:none}", "<p class='b a'>"),
        ("#a {VISIBILITY: hidden}", "<p id=a>"),
        ("p.a, q {font-size:0 !important}", "<p class=a style='color:red'>"),
        ("u {opacity: 0} /* .a */", "<u>"),
        ("@media screen { .a {display:none} }", "<p class=a>"),
        (".a {display:none} p {display:block}", "<p class=a>"),
    ],
)
def test_text_that_a_style_sheet_of_the_page_hides_is_not_read(tmp_path, sheet, start):
    page = f"<html><style>{sheet}</style><p>Nine</p>{start}INJECTED</html>"
    text, reason = folded(saved(tmp_path, "page.html", page))
    assert text == "Nine"
    assert reason == "its style sheet hides text, which is not read"


@pytest.mark.parametrize(
    "sheet",
    [
        "@media print { .a {display:none} .a {opacity:0} }",
        "@media (max-width: 9px) { .a {display:none} }",
        ".a {display:none} p.a {display:block}",
        "/* .a {display:none} */",
        ".a.b {display:none}",
        ".a {opacity: 0.5; font-size: 0.9em}",
        "body {visibility:hidden}",
    ],
)
def test_text_that_a_style_sheet_shows_is_read(tmp_path, sheet):
    page = f"<html><style>{sheet}</style><body><p class=a>Nine</html>"
    assert shown(tmp_path, "page.html", page) == "Nine"


@pytest.mark.parametrize("style", ["opacity: 0.5", "font-size:0.9em", "display: block"])
def test_text_with_a_visible_style_is_read(tmp_path, style):
    assert shown(tmp_path, "page.html", f"<p style='{style}'>Nine</p>") == "Nine"


def test_numbers_of_lists_are_read(tmp_path):
    page = "<ol start=3><li>Push<li>Turn<ol type=a><li>Left</ol></ol>"
    assert shown(tmp_path, "page.html", page).split() == ["3.", "Push", "4.", "Turn", "1.", "Left"]


def test_cells_without_end_tags_stay_separate(tmp_path):
    page = "<table><tr><th>City<th>Rate<tr><td>Brno<td>7<tr><td>Plzen<td>9</table>"
    assert shown(tmp_path, "page.html", page) == "City\tRate\nBrno\t7\nPlzen\t9"


@pytest.mark.parametrize("tag", BLOCKS.split())
def test_every_block_begins_a_line(tmp_path, tag):
    page = f"<body><{tag}>one</{tag}><{tag}>two</{tag}>three"
    assert len(shown(tmp_path, "page.html", page).split()) == 3


def test_too_deeply_nested_page_is_refused(tmp_path):
    path = saved(tmp_path, "deep.html", "<div>word" * 3_000)
    with pytest.raises(
        DocumentError, match=r"deep\.html: the tags of .* 2,048 levels deep\. Download"
    ):
        text_files.read([str(path)])


# PDF.


def form(folder):
    """A PDF with a field that is filled in, of which nobody has drawn the value."""
    writer = PdfWriter(write_pdf(folder / "form.pdf", ["Name of the tenant:"]))
    place = ArrayObject(FloatObject(x) for x in (20, 150, 280, 170))
    field = named(Type="Annot", Subtype="Widget", FT="Tx", Rect=place)
    field.update(named(T=Letters("tenant"), V=Letters("Hrabal")))
    fields = ArrayObject([writer._add_object(field)])
    writer.pages[0].update(named(Annots=fields))
    writer._root_object.update(named(AcroForm=named(Fields=fields)))
    writer.write(folder / "form.pdf")
    return folder / "form.pdf"


def test_values_of_a_pdf_form_are_read(tmp_path):
    assert noted(form(tmp_path)) == ("Name of the tenant:\nHrabal", [])


def glyphs(folder, known, unknown):
    """A PDF with letters of two fonts, the second of which does not say which letters it shows."""
    writer = PdfWriter(write_pdf(folder / "glyphs.pdf", [known]))
    system = named(
        Registry=Letters("Adobe"), Ordering=Letters("Identity"), Supplement=NumberObject(0)
    )
    about = named(Type="FontDescriptor", FontName="ABCDEF+Gate", Flags=NumberObject(4))
    inner = named(Type="Font", Subtype="CIDFontType2", BaseFont="ABCDEF+Gate", CIDSystemInfo=system)
    inner.update(named(FontDescriptor=writer._add_object(about)))
    font = named(Type="Font", Subtype="Type0", BaseFont="ABCDEF+Gate", Encoding="Identity-H")
    font.update(named(DescendantFonts=ArrayObject([writer._add_object(inner)])))
    page = writer.pages[0]
    page["/Resources"]["/Font"].update(named(F2=font))
    content = DecodedStreamObject()
    codes = b"".join(b"%04X" % (ord(letter) - 29) for letter in unknown)
    content.set_data(
        page.get_contents().get_data() + b"\nBT /F2 12 Tf 20 99 Td <" + codes + b"> Tj ET"
    )
    page.update(named(Contents=writer._add_object(content)))
    writer.write(folder / "glyphs.pdf")
    return folder / "glyphs.pdf"


def test_characters_without_a_unicode_value_are_counted(tmp_path):
    path = glyphs(tmp_path, "The gate opens at nine, and the garden at ten.", "Hello")
    text, (line,) = noted(path)
    assert text.startswith("The gate opens at nine")
    assert f"partly read: {path}: for 5 of 42 characters the fonts do not say" in line


def test_pdf_without_text_is_refused(tmp_path):
    path = glyphs(tmp_path, "", "The gate opens at nine.")
    with pytest.raises(DocumentError, match=r"which letters they show\. Run OCR"):
        text_files.read([str(path)])


# E-mails and saved pages.


def letter(**head):
    message = EmailMessage()
    for key, value in head.items():
        message[key] = value
    return message


@pytest.mark.parametrize("encoding", ["base64", "quoted-printable", "8bit"])
def test_email_is_decoded(tmp_path, encoding):
    message = letter(Subject="Brána", From="Ann <ann@example.org>", To="bob@example.org")
    message.set_content("Brána se otevírá v devět.\n", cte=encoding)
    text = shown(tmp_path, "mail.eml", bytes(message))
    head = "Subject: Brána\nFrom: Ann <ann@example.org>\nTo: bob@example.org\n\n"
    assert text == head + "Brána se otevírá v devět."


def test_attachments_of_an_email_are_named_in_a_warning(tmp_path):
    message = letter(Subject="Gate")
    message.set_content("At nine.")
    message.add_alternative("<p>At <b>nine</b>.<p style='display:none'>INJECTED", subtype="html")
    message.add_attachment("more", filename="terms.txt")
    message.add_attachment(letter(Subject="Older"))
    text, (line,) = noted(saved(tmp_path, "mail.eml", bytes(message)))
    assert text == "Subject: Gate\n\nAt nine."
    assert line.endswith("it has attachments, which are not read (terms.txt, message/rfc822)")


def test_body_without_fields_of_its_own_is_read(tmp_path):
    head = "Subject: Gate\nMIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=x\n\n"
    mail = f"{head}--x\n\nAt nine.\n--x--\n"
    assert shown(tmp_path, "parts.eml", mail) == "Subject: Gate\n\nAt nine."
    for beginning in ("\ufeff", "\n\n"):
        mail = f"{beginning}Subject: Gate\n\nAt nine."
        assert shown(tmp_path, "marked.eml", mail) == "Subject: Gate\n\nAt nine."


@pytest.mark.parametrize(
    ("declared", "encoding"),
    [
        ("", "utf-8"),
        ("Content-Type: text/plain; charset=us-ascii\n", "utf-8"),
        ("Content-Type: text/html\n", "utf-8"),
        ("Content-Type: text/plain; charset=iso-8859-1\n", "windows-1252"),
        ("Content-Type: text/plain; charset=utf-8\n", "utf-8"),
    ],
)
def test_body_that_is_not_in_its_declared_encoding_keeps_its_letters(tmp_path, declared, encoding):
    mail = f"Subject: x\n{declared}\n“Fête” at nine".encode(encoding)
    assert shown(tmp_path, "mail.eml", mail) == "Subject: x\n\n“Fête” at nine"


def test_body_in_utf_16_is_read(tmp_path):
    head = b"Subject: x\nContent-Type: text/plain; charset=utf-16\n"
    body = base64.encodebytes("“Fête” at nine".encode("utf-16"))
    mail = head + b"Content-Transfer-Encoding: base64\n\n" + body
    assert shown(tmp_path, "mail.eml", mail) == "Subject: x\n\n“Fête” at nine"


def test_body_in_another_encoding_that_is_not_declared_is_refused(tmp_path):
    path = saved(tmp_path, "mail.eml", "Subject: x\n\nFête".encode("windows-1252"))
    with pytest.raises(DocumentError, match="expected utf-8 text, but got byte 0xea"):
        text_files.read([str(path)])


def test_file_inside_an_alternative_or_in_place_of_a_body_is_named_in_a_warning(tmp_path):
    inner = letter()
    inner.set_content("<p>At nine.", subtype="html")
    inner.add_attachment(b"%PDF", maintype="application", subtype="pdf", filename="terms.pdf")
    nested = letter(Subject="Gate")
    nested.set_content("At nine.")
    nested.make_alternative()
    nested.attach(inner)
    whole = letter(Subject="Scan")
    whole.set_content(b"%PDF", maintype="application", subtype="pdf", filename="scan.pdf")
    for message, name in ((nested, "terms.pdf"), (whole, "scan.pdf")):
        _, (line,) = noted(saved(tmp_path, "mail.eml", bytes(message)))
        assert line.endswith(f"it has attachments, which are not read ({name})")


def test_time_to_name_attachments_grows_with_their_number(monkeypatch):
    compared = []
    monkeypatch.setattr(EmailMessage, "__eq__", lambda *two: compared.append(1) or two[0] is two[1])
    monkeypatch.setattr(EmailMessage, "__hash__", object.__hash__)
    message = letter(Subject="Gate")
    message.set_content("At nine.")
    for _ in range(40):
        message.add_attachment("more", filename="terms.txt")
    _, (loss,) = documents._read_mail("mail.eml", bytes(message))
    assert loss.count("terms.txt") == 40
    assert len(compared) < 40


def test_saved_page_is_read_like_the_page_itself(tmp_path):
    message = letter(Subject="Gate")
    message.set_content("<p>The gate opens at <b>nine</b>.", subtype="html")
    message.add_related(base64.b64decode("R0lGODlhAQ=="), "image", "gif")
    assert "The gate opens at nine." in shown(tmp_path, "page.mhtml", bytes(message))


# Notebooks.


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"text/markdown": ["Rate **7**"], "text/plain": ["<Markdown object>"]}, "Rate **7**"),
        ({"text/html": ["<p>Rate <b>7</b></p>"], "text/plain": ["<HTML object>"]}, "Rate 7"),
        ({"text/html": ["<p>Rate <b>7</b></p>"]}, "Rate 7"),
        ({"text/html": ["<script>draw()</script>"], "text/plain": ["Figure"]}, "Figure"),
    ],
)
def test_notebook_gives_the_shown_form_of_its_outputs(tmp_path, data, text):
    cell = {"cell_type": "code", "source": ["show()"], "outputs": [{"data": data}]}
    book = json.dumps({"nbformat": 4, "cells": [cell]})
    assert shown(tmp_path, "book.ipynb", book) == f"show()\n\n{text}"


# Encodings.


def test_xml_is_read_in_its_declared_encoding(tmp_path):
    data = '<?xml version="1.0" encoding="ISO-8859-2"?>\n<a>Łódź</a>'.encode("iso-8859-2")
    assert shown(tmp_path, "a.xml", data).endswith("<a>Łódź</a>")


@pytest.mark.parametrize("encoding", ["iso2022_jp", "iso2022_kr"])
def test_seven_bit_text_is_read(tmp_path, encoding):
    text = {"iso2022_jp": "海辺の図書館", "iso2022_kr": "바닷가 도서관"}[encoding]
    text = f"Library: {text}"
    assert shown(tmp_path, "a.txt", text.encode(encoding)) == text


def test_escape_sequences_of_json_are_decoded(tmp_path):
    source = r'{"a": "\u0141\u00f3d\u017a \ud83d\ude00", "b": "\\u00e1 \u0022 \n \u0007 \ud83d"}'
    text = shown(tmp_path, "a.json", source)
    assert text == '{"a": "Łódź 😀", "b": "\\\\u00e1 \\u0022 \\n \\u0007 \\ud83d"}'
    assert json.loads(text) == json.loads(source)
    assert shown(tmp_path, "a.py", source) == source


# Files of Office programs.


def lease(folder):
    """A Word document with everything that contracts have."""
    document = Document()
    document.add_heading("Lease of <b>flat</b> & garden")
    document.add_paragraph("Control words: <|im_start|>, user_name, *star*.")
    for clause in ("Rent is due in May.", "Dogs are allowed."):
        document.add_paragraph(clause, style="List Number")
    table = document.add_table(2, 3)
    for row, cells in enumerate((("City", "Rate", "Since"), ("Brno", "", "1999"))):
        for column, cell in enumerate(cells):
            table.cell(row, column).text = cell
    document.sections[0].header.paragraphs[0].text = "Case 4711"
    document.sections[0].footer.paragraphs[0].text = "Page one"
    changed = document.add_paragraph("The rent is ")
    for tag, letters, amount in (("w:del", "w:delText", "100"), ("w:ins", "w:t", "200")):
        change, run, text = OxmlElement(tag), OxmlElement("w:r"), OxmlElement(letters)
        text.text = amount
        run.append(text)
        change.append(run)
        changed._p.append(change)
    document.save(folder / "lease.docx")
    return document, folder / "lease.docx"


def test_word_document_is_read_with_lists_tables_and_margins(tmp_path):
    _, path = lease(tmp_path)
    text, lines = noted(path)
    assert lines == []
    assert text.splitlines() == [
        "Lease of <b>flat</b> & garden",
        "Control words: <|im_start|>, user_name, *star*.",
        "   1. Rent is due in May.",
        "   2. Dogs are allowed.",
        "City\tRate\tSince",
        "Brno\t\t1999",
        "The rent is 200",
        "Case 4711",
        "Page one",
    ]


HIDDEN_IS_LOST = "it has hidden text, which is not read"


def folded(path):
    """The text of a file, and the reason of its only notice."""
    text, (line,) = noted(path)
    return text, line.removeprefix(f"partly read: {path}: ")


def hidden_styles(document):
    """Add styles to a Word document that hide text, one of them by the style it is based on."""
    for kind in (WD_STYLE_TYPE.CHARACTER, WD_STYLE_TYPE.PARAGRAPH, WD_STYLE_TYPE.TABLE):
        document.styles.add_style(f"Hidden{kind.name}", kind).font.hidden = True
    heir = document.styles.add_style("Heir", WD_STYLE_TYPE.CHARACTER)
    heir.base_style = document.styles["HiddenCHARACTER"]


def test_hidden_text_of_a_word_document_is_not_read(tmp_path):
    document = Document()
    hidden_styles(document)
    document.add_paragraph("Gate").add_run("INJECTED").font.hidden = True
    document.add_paragraph().add_run(" opens").font.hidden = False
    for style in ("HiddenCHARACTER", "Heir"):
        document.add_paragraph(style).add_run("INJECTED", style=style)
    paragraph = document.add_paragraph("INJECTED", style="HiddenPARAGRAPH")
    paragraph.add_run("at nine").font.hidden = False
    document.add_table(1, 1, style="HiddenTABLE").cell(0, 0).text = "INJECTED"
    document.sections[0].footer.paragraphs[0].add_run("INJECTED").font.hidden = True
    document.save(tmp_path / "a.docx")
    text, reason = folded(tmp_path / "a.docx")
    assert text.split() == ["Gate", "opens", "HiddenCHARACTER", "Heir", "at", "nine"]
    assert reason == HIDDEN_IS_LOST


def test_hidden_text_in_another_encoding_of_the_part_is_not_read(tmp_path):
    _, path = lease(tmp_path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    run = "<w:p><w:r><w:rPr><w:vanish/></w:rPr><w:t>INJECTED</w:t></w:r></w:p></w:body>"
    body = parts["word/document.xml"].decode().replace("</w:body>", run).partition("?>")[2]
    parts["word/document.xml"] = ('<?xml version="1.0" encoding="UTF-16"?>' + body).encode("utf-16")
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    text, reason = folded(path)
    assert "Rent is due" in text
    assert "INJECTED" not in text
    assert reason == HIDDEN_IS_LOST


@pytest.mark.parametrize(
    "hidden",
    [
        '<text:p>Gate <text:span text:style-name="H">INJECTED</text:span></text:p>',
        '<text:p>Gate</text:p><text:p text:style-name="Heir">INJECTED</text:p>',
        '<text:p>Gate</text:p><text:section text:display="none"><text:p>INJECTED</text:p>'
        "</text:section>",
        '<text:p>Gate <text:hidden-text text:is-hidden="true">INJECTED</text:hidden-text></text:p>',
        "<text:p>Gate</text:p><text:p><text:hidden-paragraph/>INJECTED</text:p>",
    ],
    ids=["span", "inherited", "section", "field", "paragraph"],
)
def test_hidden_text_of_an_opendocument_text_is_not_read(tmp_path, hidden):
    styles = (
        '<a:automatic-styles xmlns:a="urn:oasis:names:tc:opendocument:xmlns:office:1.0" '
        'xmlns:style="urn:oasis:names:tc:opendocument:xmlns:style:1.0"><style:style '
        'style:name="H"><style:text-properties text:display="none"/></style:style><style:style '
        'style:name="Heir" style:parent-style-name="H"/></a:automatic-styles>'
    )
    path = saved(
        tmp_path, "a.odt", open_document("text", f"{styles}{hidden}<text:p>at nine</text:p>")
    )
    text, reason = folded(path)
    assert text.split() == ["Gate", "at", "nine"]
    assert reason == HIDDEN_IS_LOST


def test_hidden_text_of_rtf_is_reported(tmp_path):
    path = saved(tmp_path, "a.rtf", rb"{\rtf1 Gate {\v secret} \viewkind4 at nine}")
    assert folded(path)[1] == "it has hidden text, which was read with the rest"


def test_formulas_without_results_are_reported(tmp_path):
    book = Workbook()
    book.active["A1"], book.active["A2"] = "Total", "=SUM(B1:B2)"
    book.save(tmp_path / "a.xlsx")
    text, (line,) = noted(tmp_path / "a.xlsx")
    assert text.split() == ["Sheet", "Total"]
    assert line.endswith("it has formulas without stored results, which are not read")


def commented_cell(path):
    book = Workbook()
    book.active["A1"] = "Gate"
    book.active["A1"].comment = Comment("At nine", "Ann")
    book.save(path)


def commented_slide(path):
    hidden_slides(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("ppt/comments/modernComment_1.xml", "<p>At nine</p>")


def annotated_cell(path):
    note = "<office:annotation><text:p>At nine</text:p></office:annotation>"
    kind = "office:value-type='string'"
    cell = f"<table:table-cell {kind}>{note}<text:p>Gate</text:p></table:table-cell>"
    rows = f"<table:table table:name='S'><table:table-row>{cell}</table:table-row></table:table>"
    path.write_bytes(open_document("spreadsheet", rows))


@pytest.mark.parametrize(
    ("name", "make"),
    [("a.xlsx", commented_cell), ("a.pptx", commented_slide), ("a.ods", annotated_cell)],
)
def test_comments_that_are_not_read_are_reported(tmp_path, name, make):
    make(tmp_path / name)
    text, (line,) = noted(tmp_path / name)
    assert "nine" not in text
    assert "it has comments, which are not read" in line


def test_text_that_was_moved_is_read_at_its_new_place_only(tmp_path):
    document = Document()
    for tag in ("w:moveFrom", "w:moveTo"):
        change, run, text = OxmlElement(tag), OxmlElement("w:r"), OxmlElement("w:t")
        text.text = "at nine"
        run.append(text)
        change.append(run)
        document.add_paragraph(f"{tag}: ")._p.append(change)
    document.save(tmp_path / "a.docx")
    text, lines = noted(tmp_path / "a.docx")
    assert (text, lines) == ("w:moveFrom: \nw:moveTo: at nine", [])


@pytest.mark.parametrize(
    ("cell", "is_missing"),
    [
        ('<c r="A1"><f>B1</f><v></v></c>', True),
        ('<c r="A1"><f t="shared" si="0"/></c>', True),
        ('<x:c r="A1"><x:f>B1</x:f><x:v/></x:c>', True),
        ('<c r="A1"><f>B1</f><v>7</v></c>', False),
        ('<c r="A1" t="str"><f>""</f><v></v></c>', False),
        ('<c r="A1"><v></v></c>', False),
        ('<cols/><c r="A1"><v>1</v></c><f>B1</f>', False),
        ('<table:table-cell table:formula="of:=1"/>', True),
        ('<table:table-cell table:formula="of:=1" office:value-type="float"/>', False),
    ],
)
def test_only_formulas_without_results_are_found(cell, is_missing):
    assert bool(_NOT_COMPUTED.search(cell.encode())) == is_missing


def hidden_sheets(path):
    book = Workbook()
    book.active["A1"] = "word"
    book.active.row_dimensions[1].hidden = True
    book.save(path)


def hidden_slides(path):
    slides = Presentation()
    slide = slides.slides.add_slide(slides.slide_layouts[0])
    slide.shapes.title.text = "word"
    slide._element.set("show", "0")
    slides.save(path)


@pytest.mark.parametrize(("name", "make"), [("a.xlsx", hidden_sheets), ("a.pptx", hidden_slides)])
def test_hidden_rows_and_slides_are_read_and_reported(tmp_path, name, make):
    make(tmp_path / name)
    text, reason = folded(tmp_path / name)
    assert "word" in text
    assert reason == "it has hidden sheets, rows, columns or slides, which were read"


def test_workbook_is_read_sheet_by_sheet(tmp_path):
    book = Workbook()
    book.active.title = "Costs"
    for row in (("Name", "May", "June"), ("Rent", 100, None), (None, 5.5, True)):
        book.active.append(row)
    book.create_sheet("Notes")["A1"] = "At nine"
    book.save(tmp_path / "a.xlsx")
    text, _ = noted(tmp_path / "a.xlsx")
    rows = ["Costs", "Name\tMay\tJune", "Rent\t100", "\t5.5\ttrue", "Notes", "At nine"]
    assert [line.rstrip() for line in text.splitlines()] == rows


def test_slides_are_read_with_their_notes(tmp_path):
    slides = Presentation()
    slide = slides.slides.add_slide(slides.slide_layouts[1])
    slide.shapes.title.text = "Gate"
    slide.placeholders[1].text = "Opens at nine"
    slide.notes_slide.notes_text_frame.text = "Say hello"
    table = slide.shapes.add_table(1, 2, 0, 0, Cm(5), Cm(5)).table
    table.cell(0, 0).text, table.cell(0, 1).text = "Brno", "7"
    slides.save(tmp_path / "a.pptx")
    words = noted(tmp_path / "a.pptx")[0].split()
    assert words == ["Gate", "Opens", "at", "nine", "Brno", "7", "Notes:", "Say", "hello"]


def test_rtf_document_is_read(tmp_path):
    data = rb"{\rtf1\ansi\ansicpg1250 Br\'e1na se otev\'edr\'e1 v dev\'ect.\par}"
    assert shown(tmp_path, "a.txt", data) == "Brána se otevírá v devět."


def book(folder, chapters):
    """An EPUB of these chapters."""
    with zipfile.ZipFile(folder / "a.epub", "w") as archive:
        archive.writestr("mimetype", "application/epub+zip")
        archive.writestr("META-INF/container.xml", '<a><rootfile full-path="in/book.opf"/></a>')
        items = "".join(f'<item id="i{n}" href="a%20{n}.xhtml"/>' for n in range(len(chapters)))
        order = "".join(f'<itemref idref="i{n}"/>' for n in range(len(chapters)))
        archive.writestr("in/book.opf", f"<a>{items}<spine>{order}</spine></a>")
        for number, chapter in reversed([*enumerate(chapters)]):
            archive.writestr(f"in/a {number}.xhtml", chapter)
    return folder / "a.epub"


def test_book_is_read_chapter_by_chapter(tmp_path):
    path = book(tmp_path, ["<ol><li>Push<li>Turn</ol>", "<p>Ending<p hidden>INJECTED"])
    assert noted(path) == ("1. Push\n 2. Turn\n\nEnding", [])


def test_folder_is_read_with_its_documents(tmp_path):
    lease(tmp_path)
    book(tmp_path, ["Gate"])
    (tmp_path / "notes.txt").write_text("text")
    names = [document.name.rpartition("/")[2] for document in text_files.read([str(tmp_path)])]
    assert names == ["a.epub", "lease.docx", "notes.txt"]


# What strangers could send.


def test_slow_document_is_refused_and_the_next_one_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(document_process, "_SECONDS", 1)
    path = book(tmp_path, ["<p>word" * 200_000] * 20)
    with pytest.raises(
        DocumentError, match=r"could not be read within 1 seconds and 4\.0 GiB of memory"
    ):
        text_files.read([str(path)])
    monkeypatch.undo()
    assert shown(tmp_path, "page.html", "<p>Next") == "Next"


def test_document_that_needs_too_much_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(document_process, "_MOST_MEMORY", 2**28)
    document_process.PROCESS.close()
    path = book(tmp_path, ["A" * 2**25])
    with pytest.raises(DocumentError, match=r"could not be read within"):
        text_files.read([str(path)])
    document_process.PROCESS.close()


def test_document_with_too_much_text_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_MOST_BYTES", 1000)
    path = book(tmp_path, ["<p>word" * 300])
    with pytest.raises(DocumentError, match=r"expected at most 1000 B of text, .* got more with"):
        text_files.read([str(path)])


@pytest.mark.parametrize("name", ["a.docx", "a.epub"])
def test_archive_with_too_much_markup_is_refused(tmp_path, name):
    with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("mimetype", "application/epub+zip" if name == "a.epub" else "")
        archive.writestr("META-INF/container.xml", " " * (2**26 + 1))
        archive.writestr("word/document.xml", " " * (2**26 + 1))
    with pytest.raises(DocumentError, match="at most 64 MiB of markup, but got more in"):
        text_files.read([str(tmp_path / name)])


@pytest.mark.parametrize("name", ["a.docx", "a.odt", "a.epub"])
def test_xml_entities_that_multiply_are_refused(tmp_path, name):
    entities = "".join(f'<!ENTITY e{n + 1} "{f"&e{n};" * 10}">' for n in range(9))
    page = f'<!DOCTYPE a [<!ENTITY e0 "{"A" * 100}">{entities}]><a>&e9;</a>'
    with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
        if name == "a.docx":
            archive.writestr("word/document.xml", page)
        else:
            kind = {"a.odt": "vnd.oasis.opendocument.text", "a.epub": "epub+zip"}[name]
            archive.writestr("mimetype", f"application/{kind}")
            archive.writestr("content.xml", page)
            archive.writestr("META-INF/container.xml", page)
    with pytest.raises(DocumentError):
        text_files.read([str(tmp_path / name)])


def test_answer_after_an_interrupt_is_not_the_previous_documents(tmp_path, monkeypatch):
    asked = document_process._asked

    def interrupt(process, question, data):
        process.stdin.write(json.dumps(question).encode() + b"\n" + data)
        process.stdin.flush()
        raise KeyboardInterrupt

    monkeypatch.setattr(document_process, "_asked", interrupt)
    with pytest.raises(KeyboardInterrupt):
        shown(tmp_path, "first.html", "<p>First")
    monkeypatch.setattr(document_process, "_asked", asked)
    assert shown(tmp_path, "next.html", "<p>Next") == "Next"


def test_several_threads_read_documents_together(tmp_path):
    texts = {}

    def read(number):
        (tmp_path / str(number)).mkdir()
        texts[number] = shown(tmp_path / str(number), "page.html", f"<p>Number {number}")

    threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: f"Number {number}" for number in range(8)}


def test_reading_writes_no_file_in_the_home_folder(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(home))
    document_process.PROCESS.close()
    text_files.read([str(lease(tmp_path)[1]), str(form(tmp_path))])
    document_process.PROCESS.close()
    assert list(home.iterdir()) == []
