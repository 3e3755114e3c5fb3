"""Reading documents: every format as text, every bad file refused in one line."""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import shlex
import sqlite3
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from snapkv.errors import DocumentError, MissingDependencyError
from snapkv_app import document_process, text_files
from snapkv_app.library.records import Text


def named(**parts):
    values = {key: NameObject(f"/{v}") if type(v) is str else v for key, v in parts.items()}
    return DictionaryObject({NameObject(f"/{key}"): value for key, value in values.items()})


def write_pdf(path, pages, password=None):
    writer = PdfWriter()
    font = named(Type="Font", Subtype="Type1", BaseFont="Helvetica")
    for text in pages:
        page = writer.add_blank_page(width=300, height=300)
        page[NameObject("/Resources")] = named(Font=named(F1=font))
        content = DecodedStreamObject()
        shown = f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET" if text else "20 20 200 200 re f"
        content.set_data(shown.encode())
        page[NameObject("/Contents")] = writer._add_object(content)
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    writer.write(path)
    return path


def blank_pdf(folder):
    writer = PdfWriter()
    for _ in range(2):
        writer.add_blank_page(width=300, height=300)
    writer.write(folder / "blank.pdf")
    return folder / "blank.pdf"


def text_of(path):
    (document,) = text_files.read([str(path)])
    assert (document.name, document.source) == (str(path), str(path.absolute()))
    return document.text


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]
)
@pytest.mark.parametrize("name", ["notes.txt", "main.py", "no_suffix"])
def test_text_is_read_unchanged_in_any_unicode_encoding(tmp_path, name, encoding):
    path = tmp_path / name
    path.write_bytes("# Zoë\r\n\n    owes *12 €*\rand\n".encode(encoding))
    assert text_of(path) == "# Zoë\n\n    owes *12 €*\nand"


def test_html_gives_the_text_that_a_browser_shows(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(
        "<html><head><title>News</title><style>p {}</style><script>alert(1)</script></head><body>"
        "<h1>Head</h1><p>One\n   <b>bold</b> word.</p><!-- no --><p hidden>no</p>"
        "<ul><li>first</li><li>second</li></ul><pre>a\n  b</pre></body></html>",
        encoding="utf-8",
    )
    lines = [line for line in text_of(path).splitlines() if line.strip()]
    assert lines == ["News", "Head", "One bold word.", "  * first", "  * second", "a", "  b"]


@pytest.mark.parametrize(
    ("declared", "encoding", "text"),
    [
        ("latin-1", "windows-1252", "„Zoë“"),
        ("iso-8859-2", "iso-8859-2", "Łódź"),
        ("utf-16", "utf-8", "Zoë"),
        ("gb2312", "gb18030", "朱镕基"),
        ("shift_jis", "cp932", "①"),
        ("euc-kr", "cp949", "똠"),
    ],
)
def test_page_is_decoded_as_browsers_decode_it(tmp_path, declared, encoding, text):
    path = tmp_path / "page.html"
    path.write_bytes(f'<meta charset="{declared}"><p>{text}</p>'.encode(encoding))
    assert text_of(path) == text


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("<p>Text" * 8000, "\n\n".join(["Text"] * 8000)),
        (f"<pre>a{' ' * 80_000}b</pre>", f"a{' ' * 80_000}b"),
    ],
    ids=["open", "spaces"],
)
def test_html_is_read_in_linear_time(tmp_path, markup, text):
    """In quadratic time, each page would take minutes."""
    path, began = tmp_path / "page.html", time.process_time()
    path.write_text(f"<html>{markup}</html>")
    (page,) = text_files.read([str(path)])
    assert page.text == text
    assert time.process_time() - began < 15


@pytest.mark.parametrize("name", ["paper.pdf", "download"])
def test_pdf_gives_the_text_of_every_page(tmp_path, name):
    path = write_pdf(tmp_path / name, ["First page.", "Second page."])
    assert text_of(path) == "First page.\n\nSecond page."


def test_notebook_gives_its_cells_and_their_outputs(tmp_path):
    drawn = {"image/png": "iVBOR", "text/plain": ["<Figure>"]}
    outputs = [
        {"name": "stdout", "text": ["3\n", "4\n"]},
        {"data": drawn},
        {"ename": "KeyError", "evalue": "7"},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Tides\n", "in fathoms"]},
        {"cell_type": "code", "source": "tides()", "outputs": outputs},
    ]
    path = tmp_path / "tides.ipynb"
    path.write_text(json.dumps({"cells": cells, "nbformat": 4}))
    (document,) = text_files.read([str(path)])
    assert document.text == "# Tides\nin fathoms\n\ntides()\n\n3\n4\n\n<Figure>\n\nKeyError: 7"


def test_dash_reads_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"piped text\n")))
    assert text_files.read(["-"]) == [Text(name="standard input", text="piped text")]


def test_several_documents_are_joined_under_their_names(tmp_path):
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.txt").write_text("second")
    read = text_files.read([str(tmp_path / "b.txt"), str(tmp_path / "a.txt")])
    joined = text_files.join(read)
    assert joined == (
        f"===== {tmp_path}/b.txt =====\nsecond\n\n===== {tmp_path}/a.txt =====\nfirst"
    )
    assert text_files.join(read[:1]) == "second"


FOLDERS = {
    "files of no text and hidden ones": (
        ["a.py", "b/c.md", "b/d.txt", "e.html"],
        [".env", ".git/config", "b/.hidden/x.py", "node_modules/x.js", "b/__pycache__/x.py"],
        {"__init__.py": b"", "image.png": b"\x89PNG\0\0"},
    ),
    "libraries": (
        ["a.txt", "other/documents/b.json", "other/library.json"],
        [f"below/made/{name}" for name in ("library.json", "library.lock", "documents/1.json")],
        {"below/made/library.json": b'{\n "format": "snapkv library 2",\n}'},
    ),
}


@pytest.mark.parametrize(("kept", "skipped", "other"), FOLDERS.values(), ids=FOLDERS)
def test_folder_gives_its_text_files_in_order(tmp_path, kept, skipped, other):
    for name in kept + skipped:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}")
    for name, content in other.items():
        (tmp_path / name).write_bytes(content)
    read = text_files.read([str(tmp_path)])
    assert [document.name for document in read] == [str(tmp_path / name) for name in kept]


def bad_file(name, data):
    return lambda folder: (folder / name, (folder / name).write_bytes(data))[0]


def write_unreadable(folder):
    """Files that should have text and cannot be read; their names in order."""
    (folder / "blank.html").write_text("<html><body><p> </p></body></html>")
    (folder / "broken.pdf").write_bytes(b"%PDF-1.7\ngarbage")
    (folder / "old.txt").write_bytes("Zoë".encode("latin-1"))
    write_pdf(folder / "scan.pdf", [""])
    return ["blank.html", "broken.pdf", "old.txt", "scan.pdf"]


def test_unreadable_files_of_a_folder_are_skipped(tmp_path, capsys):
    names = write_unreadable(tmp_path)
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "letter.docx").write_bytes(b"PK\3\4\0\0")
    (tmp_path / "zeros.txt").write_bytes(b"a text\0 with zeros")
    (tmp_path / "zone.md").symlink_to("nowhere.md")
    read = text_files.read([str(tmp_path), str(tmp_path)])
    assert [document.name for document in read] == [str(tmp_path / "notes.txt")] * 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        ["skipped", str(tmp_path / name)]
        for name in sorted([*names, "letter.docx", "zeros.txt", "zone.md"])
    ]
    assert "got byte 0xeb at offset 2" in lines[3]


def test_file_without_permission_is_refused_or_skipped_in_a_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_text("text")
    opened = Path.open

    def refuse(self, *mode):
        if self.name == "a.txt":
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *mode)

    monkeypatch.setattr("pathlib.Path.open", refuse)
    (document,) = text_files.read([str(tmp_path)])
    assert document.name == str(tmp_path / "b.txt")
    assert "a.txt could not be read: Permission denied" in capsys.readouterr().err
    with pytest.raises(DocumentError, match=r"a\.txt could not be read: Permission denied"):
        text_files.read([str(tmp_path / "a.txt")])


def unreadable_folder(folder):
    write_unreadable(folder)
    (folder / "reports.txt").unlink()
    return folder


def empty_folder(folder):
    (folder / "empty").mkdir()
    (folder / "empty" / "image.png").write_bytes(b"\0")
    return folder / "empty"


def misspelt(folder):
    return bad_file("li\nes.txt", b"text")(folder).with_name("lines.tx")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "report.txt", "Did you mean reports.txt?"),
        (lambda folder: folder / "missing", ". Run ls "),
        (lambda folder: folder / "nowhere" / "report.txt", "There is no folder"),
        (lambda folder: "https://example.com/a.txt", "address 'https://example.com/a.txt', which"),
        (misspelt, r"Did you mean li\nes.txt?"),
        (lambda folder: "", "got an empty name"),
        (lambda folder: "/dev/null", "got the device /dev/null"),
        (bad_file("empty.txt", b""), "contains no text. Use a file"),
        (bad_file("image.png", b"\x89PNG\0\0"), "got a PNG image in"),
        (bad_file("image.raw", b"\x01\0\0"), "got binary data"),
        (bad_file("old.txt", "Zoë".encode("latin-1")), "got byte 0xeb at offset 2"),
        (bad_file("odd.html", b'<meta charset="klingon"><p>x</p>'), "declares 'klingon', which"),
        (
            bad_file("odd.html", b'<meta charset="undefined"><p>x</p>'),
            "declares 'undefined', which is not",
        ),
        (bad_file("broken.pdf", b"%PDF-1.7\ngarbage"), "expected a complete document"),
        (bad_file("cut.pdf", b"%PDF-1.7\n"), ". Download or export the file again."),
        (bad_file("no.pdf", b"not a pdf"), "expected a complete document"),
        (
            lambda folder: write_pdf(folder / "scan.pdf", [""]),
            "with images only. Run OCR",
        ),
        (lambda folder: write_pdf(folder / "none.pdf", []), "expected a complete document"),
        (blank_pdf, "blank.pdf with 2 blank pages. Download"),
        (
            lambda folder: write_pdf(folder / "locked.pdf", ["no"], "sesame"),
            "is encrypted and cannot",
        ),
        (bad_file("old.ipynb", b'{"worksheets": []}'), "a Jupyter notebook with format 4"),
        (bad_file("odd.ipynb", b'{"cells": [{"source": 3}]}'), "Export it with jupyter"),
        (empty_folder, "expected a folder that contains text files"),
        (unreadable_folder, "or cannot be read (4 of them: "),
    ],
)
def test_bad_files_are_refused(tmp_path, make, message):
    (tmp_path / "reports.txt").write_text("text")
    with pytest.raises(DocumentError) as error:
        text_files.read([str(make(tmp_path))])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


PLAIN = b"A line of text.\n" * 40


def zipped(*names):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, PLAIN)
    return made.getvalue()


def tarred():
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    return made.getvalue()


def database(folder):
    with contextlib.closing(sqlite3.connect(folder / "a.db")) as made:
        made.execute("create table notes(text)")
        made.commit()
    return (folder / "a.db").read_bytes()


KINDS = {
    "a gzip file": gzip.compress(PLAIN),
    "a bzip2 file": bz2.compress(PLAIN),
    "an xz file": lzma.compress(PLAIN),
    "a Zstandard file": b"\x28\xb5\x2f\xfd\x24\x00\x01\xff",
    "a 7z archive": b"7z\xbc\xaf\x27\x1c\0\4",
    "a tar archive": tarred(),
    "a ZIP archive": zipped("a.txt"),
    "an empty ZIP archive": zipped(),
    "an OpenDocument file": zipped("mimetype", "application/vnd.oasis.opendocument.graphics"),
    "an SQLite database": database,
    "a JPEG image": b"\xff\xd8\xff\xe0\x10JFIF",
    "a WebP image": b"RIFF\xff\1\0\0WEBPVP8 ",
    "a WAV recording": b"RIFF\xff\1\0\0WAVEfmt ",
    "an MP3 recording": b"ID3\4\0\0\xff",
    "an MP4 recording": b"\0\0\0\x20ftypisom",
    "a HEIC image": b"\0\0\0\x20ftypheic",
    "a GGUF model": b"GGUF\3\0\0\0",
    "a program": b"\x7fELF\2\1\1\0",
}


@pytest.mark.parametrize("name", ["it's.txt", "a.bin"])
@pytest.mark.parametrize("kind", KINDS)
def test_binary_file_is_refused_with_its_kind(tmp_path, monkeypatch, kind, name):
    made = KINDS[kind]
    data = made(tmp_path) if callable(made) else made
    path = bad_file(name, data)(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    for source, shown in ((str(path), path), ("-", "standard input")):
        with pytest.raises(DocumentError) as error:
            text_files.read([source])
        assert f"file: expected text, but got {kind} in {shown}. " in str(error.value)
    with pytest.raises(DocumentError) as error:
        text_files.read([str(path)])
    assert kind != "a gzip file" or f"with gunzip --keep {shlex.quote(str(path))}, and" in str(
        error.value
    )


@pytest.mark.parametrize(
    "text", ["BZhang writes.", "PK\3\4", "GIF89a is a format.", "MZ", "ID3 tags", "PAR1", "BM"]
)
def test_text_that_begins_like_another_kind_of_file_is_read(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    assert text_of(tmp_path / "a.txt") == text


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("Der Turm von Süderhöft", "windows-1252"),
        ("青石镇的图书馆", "gb18030"),
        ("Дом за рекой", "windows-1251"),
        ("海辺の図書館", "shift_jis"),
    ],
)
def test_text_in_an_old_encoding_is_refused_with_a_command(tmp_path, text, encoding):
    path = bad_file("old.txt", f"plain\n{text}\n".encode(encoding))(tmp_path)
    with pytest.raises(DocumentError, match=f"iconv -f .*{encoding.upper()}.* -t UTF-8"):
        text_files.read([str(path)])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            b"word ",
            "of text, and documents of at most 512.0 MiB, but got more with {name}.",
        ),
        (b"word\0", "got binary data"),
    ],
)
@pytest.mark.parametrize("source", ["file", "pipe", "folder"])
def test_endless_text_is_read_up_to_a_limit(tmp_path, monkeypatch, source, content, said):
    monkeypatch.setattr(text_files, "_MOST_BYTES", 1024)
    endless = io.BytesIO(content * 1000)
    name = tmp_path / "big.txt"
    name.write_bytes(endless.getvalue())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(endless))
    asked = {"file": name, "pipe": "-", "folder": tmp_path}[source]
    with pytest.raises(DocumentError) as error:
        text_files.read([str(asked)])
    shown = "standard input" if source == "pipe" else name
    assert said.format(name=shown) in str(error.value)
    assert endless.tell() <= 1025


def test_limit_counts_all_texts_of_a_folder_and_the_text_of_a_pdf(tmp_path, monkeypatch):
    path = write_pdf(tmp_path / "large.pdf", ["First page."])
    monkeypatch.setattr(text_files, "_MOST_BYTES", 40)
    assert text_of(path) == "First page."
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("A line of text.\n" * 2)
    with pytest.raises(
        DocumentError, match=r"of text, .* got more with .*b\.txt\. Use a smaller file"
    ):
        text_files.read([str(tmp_path)])


@pytest.mark.parametrize("sources", [[], ["-", "-"]], ids=["none", "stdin-twice"])
def test_bad_lists_of_sources_are_refused(sources):
    with pytest.raises(DocumentError, match="expected"):
        text_files.read(sources)


@pytest.mark.parametrize(
    ("name", "package"), [("a.pdf", "pypdfium2"), ("a.html", "inscriptis"), ("a.rtf", "xberg")]
)
def test_missing_reader_package_is_named_with_its_remedy(tmp_path, monkeypatch, name, package):
    (tmp_path / name).write_text("{\\rtf1 text}" if name == "a.rtf" else "text")
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError(name={package!r})")
    monkeypatch.syspath_prepend(tmp_path)
    document_process.PROCESS.close()  # the next one does not find the package
    with pytest.raises(MissingDependencyError, match=f"pip install '{package}"):
        text_files.read([str(tmp_path / name)])
    document_process.PROCESS.close()


# What was read in part.


def noted(path):
    """The text of a document, and the notices."""
    lines = []
    (document,) = text_files.read([str(path)], on_notice=lines.append)
    return document.text, lines


def revised_pdf(folder):
    """A PDF of two pages that were appended to one of a single page, and where the first ended."""
    first = write_pdf(folder / "first.pdf", ["First page."]).read_bytes()
    writer = PdfWriter(io.BytesIO(first), incremental=True)
    writer.append(write_pdf(folder / "other.pdf", ["Second page.", "Third page."]))
    writer.write(folder / "revised.pdf")
    return folder / "revised.pdf", len(first)


def test_truncated_pdf_is_refused_or_reported(tmp_path):
    """PDFium reads an earlier revision of a file that was cut off, without a word.

    Cut exactly where the earlier one ends, the file is that one.
    """
    path, first = revised_pdf(tmp_path)
    whole, lines = noted(path)
    assert (whole, lines) == ("First page.\n\nSecond page.\n\nThird page.", [])
    data, outcomes = path.read_bytes(), set()
    for kept_bytes in {*range(60, len(data) - 1, 97), *range(len(data) - 30, len(data) - 1)}:
        if kept_bytes in (first - 1, first):
            continue
        path.write_bytes(data[:kept_bytes])
        try:
            text, lines = noted(path)
        except DocumentError:
            outcomes.add("refused")
        else:
            assert len(lines) == 1
            assert lines[0].startswith(f"partly read: {path}: it does not end as a PDF does")
            assert "\n" not in lines[0]
            outcomes.add("whole" if text == whole else "less")
    assert outcomes == {"refused", "less", "whole"}


def damaged(change):
    """A PDF of two pages with some of its bytes replaced."""

    def make(folder):
        path = write_pdf(folder / "notes.pdf", ["First page.", "Second page."])
        before = path.read_bytes()
        path.write_bytes(change(before))
        assert path.read_bytes() != before
        return path

    return make


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            damaged(lambda data: data.replace(b"startxref\n", b"startxref\n1")),
            "it is damaged, and was read as far as PDFium could repair it",
        ),
        (damaged(lambda data: data.removesuffix(b"F\n")), "it does not end as a PDF does"),
    ],
    ids=["wrong start", "cut off"],
)
def test_repaired_pdf_is_reported(tmp_path, make, reason):
    path = make(tmp_path)
    text, (line,) = noted(path)
    assert text == "First page.\n\nSecond page."
    assert line.startswith(f"partly read: {path}: {reason}")


def test_only_pages_that_show_something_without_text_are_reported(tmp_path):
    writer = PdfWriter(write_pdf(tmp_path / "notes.pdf", ["First page."]))
    writer.add_blank_page(width=300, height=300)
    writer.write(tmp_path / "with-blank.pdf")
    assert noted(tmp_path / "with-blank.pdf")[1] == []
    path = write_pdf(tmp_path / "notes.pdf", ["First page.", "", "Third page."])
    text, (line,) = noted(path)
    assert text == "First page.\n\n\n\nThird page."
    assert line.startswith(f"partly read: {path}: 1 of 3 pages have images or drawings and no text")


@pytest.mark.parametrize(
    ("page", "whole"),
    [
        ("<!DOCTYPE html><HTML lang=en><p>Text</HTML >\n", True),
        ("<!DOCTYPE html><title>T</title><p>Text", True),  # both ends of html may be left out
        ("<html><body><p>Text</p><p>Mor", False),
        ("<HTML><p>Text<script>var x = 1;", False),
    ],
)
def test_truncated_html_is_reported(tmp_path, page, whole):
    path = tmp_path / "page.html"
    path.write_text(page)
    text, lines = noted(path)
    assert "Text" in text
    assert [line.startswith(f"partly read: {path}: it begins with <html>") for line in lines] == (
        [] if whole else [True]
    )


def test_every_notice_is_given_one_time_and_names_its_file(tmp_path, capsys, monkeypatch):
    path, _ = revised_pdf(tmp_path)
    path.write_bytes(path.read_bytes()[:-9])
    (tmp_path / "old.txt").write_bytes("Zoë".encode("latin-1"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    found, lines = text_files.read_with_notices([str(path), str(tmp_path), str(path), "-"])
    assert len(found) == 6
    assert [line.partition(": it ")[0].partition(": exp")[0] for line in lines] == [
        f"partly read: {path}",
        f"skipped: {tmp_path / 'old.txt'}",
        "partly read: standard input",
    ]
    assert capsys.readouterr().err.splitlines() == lines


def test_cells_of_a_minified_table_stay_separate(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(
        "<table><tr><th>Day</th><td>Closes</td></tr><tr><td>Saturday</td><td>15:45</td></tr></table>"
    )
    (read,) = text_files.read([str(path)])
    assert read.text.split() == ["Day", "Closes", "Saturday", "15:45"]
