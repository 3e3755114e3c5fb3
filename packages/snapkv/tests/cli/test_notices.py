"""What was not read of a document is said in one line, and in the JSON, by every command."""

import io
import json

import pytest

from tests.app.test_text_files import write_pdf
from tests.cli.conftest import DOCUMENT
from tests.lab.evaluate.tiny import tiny_loaded

SMALL = ("--budget", 48, "--window-size", 16, "--max-new-tokens", 2)
QUESTION = ("-q", "Where is the key?")


@pytest.fixture
def tiny_only(monkeypatch, demo):
    """`load` gives a model of random weights."""
    tiny = tiny_loaded(demo.tokenizer, positions=1024)
    monkeypatch.setattr("snapkv.cli.loading.load", lambda **_: tiny)


@pytest.fixture
def cut_off(tmp_path):
    """A PDF without its last bytes, of which pypdf reads all the same."""
    path = write_pdf(tmp_path / "notes.pdf", [DOCUMENT * 2])
    path.write_bytes(path.read_bytes()[:-3])
    return path


def said(done, path):
    """The one line about that file."""
    assert done.status == 0, done.err
    (line,) = (line for line in done.err.splitlines() if line.startswith("partly read"))
    assert line.startswith(f"partly read: {path}: it does not end as a PDF does")
    return line


COMMANDS = {
    "ask": (*SMALL, *QUESTION),
    "generate": SMALL,
    "study instructions --document": (
        *("--document-tokens", 130, "--answer-length", 1),
        *("-q", "Where is the key?", "-q", "When does the gate open?"),
    ),
    "study sensitivity --haystack": (
        *("--length", 300, "--depths", 1, "--windows", 16, "--kernels", 1, "--digits", 1),
        *("--budget", 48),
    ),
    "eval needle --haystack": (
        *("--lengths", 300, "--depths", 1, "--digits", 1, "--policy", "snapkv", "--budget", 48),
    ),
    "eval ruler --haystack": (
        *("--lengths", 600, "--tasks", "niah_single_2", "--samples-each", 1),
        *("--policy", "snapkv", "--budget", 48),
    ),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_in_the_json_and_on_standard_error(snapkv, tiny_only, cut_off, command, monkeypatch):
    monkeypatch.chdir(cut_off.parent)
    words = command.split()
    source = cut_off
    if words[-1] == "--haystack":
        source = cut_off.parent
        write_pdf(cut_off, [DOCUMENT * 12])
        cut_off.write_bytes(cut_off.read_bytes()[:-3])
    done = snapkv(*words, source, *COMMANDS[command], "--json")
    line = said(done, cut_off)
    assert json.loads(done.out)["warnings"] == [line]


def test_where_all_is_read_there_are_none(snapkv, tiny_only, document):
    done = snapkv("ask", document, *SMALL, *QUESTION, "--json")
    assert json.loads(done.out)["warnings"] == []
    done = snapkv("generate", "--prompt", "The gate", *SMALL, "--json")
    assert json.loads(done.out)["warnings"] == []


def test_files_of_a_folder_that_are_left_out_are_among_them(snapkv, tiny_only, document):
    (document.parent / "old.txt").write_bytes("Zoë".encode("latin-1"))
    done = snapkv("ask", document.parent, *SMALL, *QUESTION, "--json")
    (line,) = json.loads(done.out)["warnings"]
    assert line.startswith(f"skipped: {document.parent / 'old.txt'}: expected utf-8 text")
    assert line in done.err.splitlines()


def test_in_a_conversation_with_every_answer(snapkv, tiny_only, cut_off, document, monkeypatch):
    def talk(*lines, files=(cut_off,)):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return snapkv("chat", *files, *SMALL, "--json")

    saved = document.parent / "talk"
    done = talk("Where is the key?", "When does the gate open?", f"/save {saved}")
    line = said(done, cut_off)
    assert [json.loads(answer)["warnings"] for answer in done.out.splitlines()] == [[line]] * 2
    assert json.loads(talk("Where?", files=()).out)["warnings"] == []
    assert json.loads(talk(f"/load {saved}", "Where?").out)["warnings"] == []


def test_on_the_inspector_s_page(snapkv, tiny_only, cut_off, tmp_path):
    page = tmp_path / "page.html"
    done = snapkv("inspect", cut_off, *QUESTION, *SMALL, "--checks", 0, "-o", page)
    line = said(done, cut_off)
    assert json.dumps(line)[1:-1] in page.read_text(encoding="utf-8")
