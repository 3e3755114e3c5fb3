"""Files that a stranger could send are read, or refused in one line, within bounds."""

import time

import pytest

from snapkv.errors import DocumentError
from snapkv_app import document_process, text_files
from tests.app.hostile_documents import ENCODINGS, FILES, declared

SECONDS = 30
"""Three times what the slowest file takes on an idle core."""

MEMORY = 2**30 + 2**28
"""A gibibyte, and what the process and its libraries take themselves."""

SLOW = (
    "bomb",
    "pages",
    "entries",
    "paragraphs",
    "rows",
    "letters",
    "output",
    "rtf-deep",
    "escapes",
)
"""Parts of the names of files that take more than two seconds to make and to read."""


@pytest.fixture(scope="module", autouse=True)
def _small_process():
    """Read the documents of this module in a process with narrow bounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_process, "_SECONDS", SECONDS)
        patch.setattr(document_process, "_MOST_MEMORY", MEMORY)
        document_process.PROCESS.close()
        yield
        document_process.PROCESS.close()


def marked(name):
    """The parameter of a file, which is slow if its name says so."""
    marks = [pytest.mark.slow] if any(part in name for part in SLOW) else []
    return pytest.param(name, marks=marks)


def outcome(path):
    """The text of a file, or the error that refuses it."""
    try:
        return text_files.read([str(path)])[0].text
    except DocumentError as error:
        return error


@pytest.mark.parametrize("name", [marked(name) for name in FILES])
def test_hostile_file_is_read_or_refused_within_bounds(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(FILES[name]())
    began = time.monotonic()
    result = outcome(path)
    assert time.monotonic() - began < SECONDS
    if isinstance(result, DocumentError):
        # PDFium unpacks a stream before anyone can ask for its size, so the process must end.
        assert ("could not be read within" in str(result)) <= name.startswith("pdf-bomb")
        assert "\n" not in str(result)
        assert "MemoryError" not in str(result)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("form", ["html", "eml"])
def test_encoding_that_no_text_is_in_is_refused(tmp_path, encoding, form):
    path = tmp_path / f"a.{form}"
    head = b"Content-Type: text/plain; charset=%s\n\n" % encoding.encode()
    path.write_bytes(head + b"word" if form == "eml" else declared(encoding))
    with pytest.raises(DocumentError, match=f"declares '{encoding}', which is not a known enc"):
        text_files.read([str(path)])


def test_document_after_a_hostile_one_is_read(tmp_path):
    (tmp_path / "page.html").write_text("<p>Next")
    assert text_files.read([str(tmp_path / "page.html")])[0].text == "Next"
