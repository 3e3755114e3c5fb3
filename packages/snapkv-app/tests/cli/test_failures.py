"""Every failure is one line on standard error with the right status and no partial output."""

import errno
import io
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from snapkv import __version__
from snapkv.cache.saving import writing
from snapkv.errors import OutOfMemoryError
from tests.app.test_text_files import write_pdf
from tests.cli.conftest import DOCUMENT, given, run_python
from tests.families import tiny_model
from tests.lab.cli.test_eval import NEEDLE

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers on static caches
QUESTION = ("-q", "Why?")
SMALL = ("--budget", 48, "--window-size", 16, "--max-new-tokens", 2)


def test_missing_command_prints_help(snapkv):
    done = snapkv()
    assert done.status == 2
    assert "Usage: snapkv" in done.out
    assert "A command is missing. See snapkv --help." in done.err
    assert "A command is missing. See snapkv library --help." in snapkv("library").err


@pytest.mark.parametrize("output", [("--json",), ("--compare",)])
def test_too_long_prompt_prints_no_answer(refused, tiny_only, output):
    start = ("--answer-start", "So", "--max-new-tokens", 100)
    said = refused("generate", "-p", "word " * 1200, *start, *output)
    assert "Choose a model with more positions, or shorten the prompt to at most 924 tokens" in said
    assert "lower max_new_tokens" not in said


@pytest.mark.parametrize("tokens", [1024, 2**62])
def test_too_long_answer_is_refused_with_a_number_that_works(refused, tiny_only, tokens):
    said = refused("generate", "-p", "word " * 40, "--max-new-tokens", tokens)
    numbers = r"prompt of (\d+) tokens .* lower max_new_tokens to at most (\d+)"
    prompt, most = re.search(numbers, said).groups()
    assert int(prompt) + int(most) == 1024


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (OutOfMemoryError("prompt: about 12 tokens would fit"), 1, "about 12 tokens would fit"),
        (KeyboardInterrupt(), 130, "snapkv: interrupted\n"),
        (RuntimeError("two\nlines"), 1, "unexpected RuntimeError: two lines. Add --verbose"),
    ],
    ids=["memory", "interrupt", "fault"],
)
def test_each_kind_of_error_has_its_exit_status(snapkv, monkeypatch, error, status, message):
    def fail(**_):
        raise error

    monkeypatch.setattr("snapkv_app.cli.loading.load", fail)
    done = snapkv("generate", "-p", "x")
    assert (done.status, done.out) == (status, "")
    assert message in done.err
    assert "Traceback" not in done.err
    if status == 1:
        assert ("Traceback" in snapkv("generate", "-p", "x", "--verbose").err) == (
            type(error) is RuntimeError
        )


def test_program_exits_with_status_and_prints_its_version():
    done = run_python("-m", "snapkv_app", "ask", "no/such/file", "-q", "Why?")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("snapkv: error: file: expected an existing file")
    assert run_python("-m", "snapkv_app", "--version").stdout == f"snapkv {__version__}\n"


def test_waiting_threads_spin_briefly_unless_the_environment_says_otherwise():
    code = (
        "import os, sys; from snapkv_app.cli import main; sys.argv[1:] = ['--version']\n"
        "try: main()\n"
        "except SystemExit: print(os.environ['OMP_WAIT_POLICY'], os.environ['GOMP_SPINCOUNT'])"
    )
    unset = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
    done = run_python("-c", code, env=unset | {"OMP_WAIT_POLICY": "ACTIVE"})
    assert done.stdout.splitlines()[-1] == "ACTIVE 3000"


def test_closed_pipe_causes_no_traceback():
    process = subprocess.Popen(
        [sys.executable, "-m", "snapkv_app", "policies"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 1
    assert errors == b""


@pytest.mark.parametrize("closed", [0, 2], ids=["input", "errors"])
def test_closed_input_and_closed_errors_do_not_stop_the_program(closed):
    code = (
        "import sys; from snapkv_app.cli import main; sys.argv[1:] = ['--version']\n"
        "try: main()\n"
        "except SystemExit: sys.stderr.write(f'read {sys.stdin.read()!r}')"
    )
    done = run_python("-c", code, stdin=subprocess.DEVNULL, preexec_fn=lambda: os.close(closed))
    assert (done.returncode, done.stderr) == (0, "" if closed else "read ''")


@pytest.mark.parametrize(
    ("arguments", "unbuffered"), [(("policies", "--json"), ""), (("--version",), "1")]
)
def test_full_standard_output_is_reported_in_one_line(arguments, unbuffered):
    with open("/dev/full", "w") as full:
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = run_python("-m", "snapkv_app", *arguments, stdout=full, env=environment)
    assert done.returncode == 1
    said = "output: standard output could not be written (No space left on device)"
    assert done.stderr.startswith(f"snapkv: error: {said}")
    assert done.stderr.count("\n") == 1


def test_full_standard_error_leaves_the_exit_status():
    with open("/dev/full", "w") as full:
        assert run_python("-m", "snapkv_app", "ask", "no", *QUESTION, stderr=full).returncode == 2


def require_one_line(done, name):
    assert done.status == 1
    assert (
        f"snapkv: error: output: the file '{name}' could not be written: No space left" in done.err
    )
    assert "Traceback" not in done.err
    assert done.err.count("snapkv: error:") == 1


def fill(path):
    """A device that is always full stands where the file would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("/dev/full")


@pytest.mark.parametrize(
    ("full", "options"),
    [
        ("n-budgets.svg", ("--plot", "n.svg")),
        ("page/results.csv", ("--report", "page")),
        ("rows/summary.jsonl", ("--results", "rows")),
    ],
)
def test_evaluation_is_printed_although_its_file_cannot_be_written(
    snapkv, tiny_only, here, full, options
):
    fill(here / full)
    done = snapkv(*NEEDLE, "--budget", "64,40", "--limit", 1, *options)
    require_one_line(done, full)
    assert "needle: accuracy by length" in done.out
    assert not list(here.rglob("*.partial"))


def test_bench_prints_one_object_although_its_file_cannot_be_written(snapkv, here, monkeypatch):
    loaded = SimpleNamespace(model=tiny_model("llama"), description=lambda: {"name": "tiny"})
    given(monkeypatch, loaded)
    fill(here / "rows.jsonl")
    small = ("--lengths", "64", "--budget", "48", "--rounds", "2")
    done = snapkv("bench", "prefill", *small, "--output", "rows.jsonl", "--json")
    require_one_line(done, "rows.jsonl")
    assert len(json.loads(done.out)["rows"]) == 2
    loaded.model.set_attn_implementation("sdpa")


def test_inspection_prints_answers_if_its_page_cannot_be_written(snapkv, tiny_only, document, here):
    fill(here / "page.html")
    done = snapkv("inspect", document, *QUESTION, "-o", "page.html", *SMALL)
    require_one_line(done, "page.html")
    labels = [line.partition(":")[0] for line in done.out.splitlines()]
    assert [label for label in labels if label in ("full cache", "default")] == [
        "full cache",
        "default",
    ]


@pytest.fixture
def cut_off(here):
    """A PDF without its last bytes, of which PDFium reads all the same."""
    path = write_pdf(here / "notes.pdf", [DOCUMENT])
    path.write_bytes(path.read_bytes()[:-3])
    return path


def said(done, path):
    """The one line about that file."""
    assert done.status == 0, done.err
    (line,) = (line for line in done.err.splitlines() if line.startswith("partly read"))
    assert line.startswith(f"partly read: {path}: it does not end as a PDF does")
    return line


@pytest.mark.parametrize("command", ["ask", "generate", "eval"])
def test_unread_parts_are_in_the_json_and_on_standard_error(snapkv, tiny_only, cut_off, command):
    call = [command, cut_off, *SMALL] + (["-q", "Where?"] if command == "ask" else [])
    if command == "eval":
        call = [*NEEDLE, "--haystack", cut_off.parent, "--budget", 48, "--limit", 1]
        write_pdf(cut_off, [DOCUMENT * 12])
        cut_off.write_bytes(cut_off.read_bytes()[:-3])
    done = snapkv(*call, "--json")
    assert json.loads(done.out)["warnings"] == [said(done, cut_off)]


def test_skipped_files_of_a_folder_are_in_the_warnings(snapkv, tiny_only, document):
    (document.parent / "old.txt").write_bytes("Zoë".encode("latin-1"))
    done = snapkv("ask", document.parent, *SMALL, *QUESTION, "--json")
    (line,) = json.loads(done.out)["warnings"]
    assert line.startswith(f"skipped: {document.parent / 'old.txt'}: expected utf-8 text")
    assert line in done.err.splitlines()


def test_warnings_are_in_each_chat_answer_and_on_the_inspectors_page(
    snapkv, tiny_only, cut_off, here, monkeypatch
):
    def talk(*lines, files=(cut_off,)):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return snapkv("chat", *files, *SMALL, "--json")

    done = talk("Where is the key?", "When?", f"/save {here / 'talk'}")
    line = said(done, cut_off)
    assert [json.loads(answer)["warnings"] for answer in done.out.splitlines()] == [[line]] * 2
    assert json.loads(talk(f"/load {here / 'talk'}", "Where?").out)["warnings"] == []
    done = snapkv("inspect", cut_off, *QUESTION, *SMALL, "-o", "page.html")
    shown = json.dumps(said(done, cut_off))[1:-1]
    assert shown in (here / "page.html").read_text(encoding="utf-8")


def test_run_stops_at_an_answer_that_cannot_be_written_and_can_continue(
    snapkv, tiny_only, here, monkeypatch
):
    real, calls = writing.os.fsync, []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) == 4:  # run.json, its folder, an answer
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor)

    monkeypatch.setattr(writing.os, "fsync", fsync)
    run = (*NEEDLE, "--budget", 64, "--results", "rows", "--json")
    require_one_line(snapkv(*run), "rows/samples.jsonl")
    assert len((here / "rows" / "samples.jsonl").read_text().splitlines()) == 1
    done = snapkv(*run)
    assert done.status == 0
    assert sum(row["samples"] for row in json.loads(done.out)["rows"]) == 8
