"""Whatever goes wrong: one line on standard error, the right exit status, nothing half-written."""

import os
import re
import subprocess
import sys

import pytest

from snapkv.errors import OutOfMemoryError
from tests.app.test_text_files import write_pdf

QUESTION = ("-q", "Why?")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "a command is missing"),
        (("frobnicate",), "No such command"),
        (("ask",), "Missing"),
        (("ask", "{document}"), "Missing option"),
        (("ask", "{document}", *QUESTION, "--bugdet", "64"), "No such option"),
        (("ask", "{document}", *QUESTION, "--budget", "many"), "--budget"),
        (("ask", "{document}", "-q", "  "), "question: expected a question"),
        (("ask", "{folder}/note.txt", *QUESTION), "did you mean notes.txt?"),
        (("ask", "{folder}/loop", *QUESTION), "loop, whose symbolic links lead in a loop"),
        (("ask", "{folder}/loop/a", *QUESTION), "a, whose symbolic links lead in a loop"),
        (("ask", "{folder}/lost", *QUESTION), "lost, a symbolic link to gone, which is not there"),
        (("ask", "{document}", *QUESTION, "--model", "{folder}/loop"), "links lead in a loop"),
        (("ask", "{folder}/empty.txt", *QUESTION), "got nothing"),
        (("ask", "{folder}/image.png", *QUESTION), "got binary data"),
        (("generate",), "expected --prompt or a file"),
        (("generate", "-p", "x", "--max-new-tokens", "0"), "max_new_tokens: expected at least 1"),
        (("generate", "-p", "x", "--temperature", "-1"), "temperature: expected 0, or a finite"),
        (("generate", "-p", "x", "--temperature", "inf"), "temperature: expected 0, or a finite"),
        (("generate", "-p", "x", "--seed", "-1"), "seed: expected at least 0"),
        (("generate", "-p", "x", "--budget", "16"), "expected more than window_size=16"),
        (("generate", "-p", "x", "--kernel-size", "4"), "expected an odd number"),
        (("generate", "-p", "x", "--policy", "snapvk"), "did you mean snapkv?"),
        (("generate", "-p", "x", "--policy", "full", "--budget", "64"), "which has none"),
        (("generate", "-p", "x", "--set", "seed=1"), "expected a parameter of default"),
        (("generate", "-p", "x", "--model", "dmo"), "did you mean demo?"),
        (("generate", "-p", "x", "--model", "{folder}"), "a folder with a config.json"),
        (("generate", "-p", "x", "--device", "gpu"), "device: expected auto"),
        (("generate", "-p", "x", "--dtype", "int8"), "dtype: expected one of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_and_status_2(snapkv, document, arguments, message):
    (document.parent / "empty.txt").touch()
    (document.parent / "loop").symlink_to("loop")
    (document.parent / "lost").symlink_to("gone")
    (document.parent / "image.png").write_bytes(b"\x89PNG\0")
    places = {"document": document, "folder": document.parent}
    done = snapkv(*[argument.format(**places) for argument in arguments])
    assert done.status == 2
    assert message in done.err
    assert "did you mean loop?" not in done.err
    if arguments:  # without any, the help comes first
        assert done.err.startswith("snapkv: error: ")
        assert done.err.count("\n") == 1
        assert done.out == ""


@pytest.mark.parametrize("output", [(), ("--json",), ("--compare",)])
def test_a_prompt_too_long_leaves_nothing_on_standard_output(snapkv, demo_only, output):
    start = ("--answer-start", "So")
    done = snapkv("generate", "-p", "word " * 9000, *start, *output)
    assert done.status == 2
    assert "8,192 positions" in done.err
    assert done.err.count("\n") == 1
    assert done.out == ""


@pytest.mark.parametrize("tokens", [8192, 99999999, 2**62])
def test_an_answer_too_long_is_refused_with_a_number_that_works(snapkv, demo_only, tokens):
    done = snapkv("generate", "-p", "word " * 40, "--max-new-tokens", tokens)
    assert done.status == 2
    numbers = r"prompt of (\d+) tokens .* lower max_new_tokens to at most ([\d,]+)"
    found = re.search(numbers, done.err)
    prompt, most = (int(number.replace(",", "")) for number in found.groups())
    assert prompt + most == 8192
    assert "-" not in done.err.removeprefix("snapkv: error:")


def test_a_prompt_too_long_is_refused_with_a_number_that_works(snapkv, demo_only):
    done = snapkv("generate", "-p", "word " * 9000, "--max-new-tokens", 100)
    assert "shorten the prompt to at most 8,092 tokens, or choose a model" in done.err
    assert "lower max_new_tokens" not in done.err


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (OutOfMemoryError("prompt: about 12 tokens would fit"), 1, "about 12 tokens would fit"),
        (KeyboardInterrupt(), 130, "snapkv: interrupted\n"),
        (RuntimeError("two\nlines"), 1, "unexpected RuntimeError: two lines; --verbose"),
    ],
    ids=["memory", "interrupt", "fault"],
)
def test_failures_have_their_own_status(snapkv, monkeypatch, error, status, message):
    def fail(**_):
        raise error

    monkeypatch.setattr("snapkv.cli.loading.load", fail)
    done = snapkv("generate", "-p", "x")
    assert done.status == status
    assert message in done.err
    assert "Traceback" not in done.err
    assert done.out == ""


def test_a_fault_shows_its_place_when_asked(snapkv, monkeypatch):
    def fail(**_):
        raise RuntimeError("broken")

    monkeypatch.setattr("snapkv.cli.loading.load", fail)
    assert "Traceback" in snapkv("generate", "-p", "x", "--verbose").err


def run_python(*arguments, **options):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, **options
    )


def test_the_program_exits_with_the_status():
    done = run_python("-m", "snapkv", "ask", "no/such/file", "-q", "Why?")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("snapkv: error: file: expected an existing file")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("kept_bytes", [None, 200, 60], ids=["broken", "truncated", "header"])
def test_a_damaged_pdf_is_one_line(tmp_path, kept_bytes):
    path = tmp_path / "fake.pdf"
    path.write_bytes(b"not a pdf at all, whatever its name says\n" * 40)
    if kept_bytes:
        write_pdf(path, ["First page."])
        path.write_bytes(path.read_bytes()[:kept_bytes])
    done = run_python("-m", "snapkv", "ask", str(path), "-q", "Why?")
    assert done.returncode == 2
    assert done.stderr.startswith("snapkv: error: file: expected a ")
    assert done.stderr.count("\n") == 1


def test_the_version_is_the_packages():
    from snapkv import __version__

    assert run_python("-m", "snapkv", "--version").stdout == f"snapkv {__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["ask", "--help"], ["ask", "nope", "-q", "x"]])
def test_help_and_cheap_checks_do_without_torch(arguments):
    code = (
        "import sys; from snapkv.cli.app import run; status = run(sys.argv[1:]); "
        "sys.exit(3 if 'torch' in sys.modules or 'transformers' in sys.modules else status)"
    )
    assert run_python("-c", code, *arguments).returncode == (2 if "nope" in arguments else 0)


def test_idle_threads_do_not_spin_unless_told_to(monkeypatch):
    code = (
        "import os, sys; from snapkv.cli import main; sys.argv[1:] = ['--version']\n"
        "try: main()\n"
        "except SystemExit: print(os.environ['OMP_WAIT_POLICY'], os.environ['GOMP_SPINCOUNT'])"
    )
    environment = {key: value for key, value in os.environ.items() if "OMP" not in key}
    done = run_python("-c", code, env=environment)
    assert done.stdout.splitlines()[-1] == "PASSIVE 0"
    done = run_python("-c", code, env={**environment, "OMP_WAIT_POLICY": "ACTIVE"})
    assert done.stdout.splitlines()[-1] == "ACTIVE 0"


def test_a_reader_that_leaves_early_gets_no_traceback():
    process = subprocess.Popen(
        [sys.executable, "-m", "snapkv", "policies"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 1
    assert errors == b""
