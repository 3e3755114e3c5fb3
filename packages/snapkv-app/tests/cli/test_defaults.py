"""Defaults that a user sets, `snapkv config`, `--quiet`, and errors for programs."""

import json
import os

import pytest

from snapkv_app.cli.defaults import OPTIONS, read_defaults
from tests.cli.conftest import run_python
from tests.cli.test_passages import QUESTION, START


@pytest.fixture
def origins(snapkv):
    """Call it to get what `snapkv config` says of each option that has a default."""

    def call():
        found = json.loads(snapkv("config", "--json").out)
        return {name: (each["value"], each["origin"]) for name, each in found.items() if each}

    return call


def test_environment_comes_before_the_nearest_file(here, origins, monkeypatch):
    assert origins() == {}
    (here / "pyproject.toml").write_text('[tool.snapkv]\nbudget = "12%"\nmax-new-tokens = 7\n')
    project = str(here / "pyproject.toml")
    assert origins() == {"budget": ("12%", project), "max_new_tokens": ("7", project)}
    (here / "below").mkdir()
    monkeypatch.chdir(here / "below")
    assert origins() == {"budget": ("12%", project), "max_new_tokens": ("7", project)}
    (here / "snapkv.toml").write_text("budget = 96\n")
    monkeypatch.setenv("SNAPKV_MODEL", "demo")
    monkeypatch.setenv("SNAPKV_DTYPE", " ")
    assert origins() == {
        "budget": ("96", str(here / "snapkv.toml")),
        "model": ("demo", "SNAPKV_MODEL"),
    }


def test_table_of_config_names_every_option(snapkv, monkeypatch):
    monkeypatch.setenv("SNAPKV_BUDGET", "512")
    said = snapkv("config").out
    assert all(name in said for name in OPTIONS)
    assert "SNAPKV_BUDGET" in said
    assert "built in" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trust_remote_code = true", "sets 'trust_remote_code', but a default for this option"),
        ("budget = true", "the value of budget must be a text or a whole number, but got True"),
        ("budget = [1]", "the value of budget must be a text or a whole number, but got [1]"),
        ("budget =", "the file is not a valid TOML file (Invalid value"),
        (
            "# " + "x" * (1 << 20),
            "the file is not a valid TOML file (the file is larger than 1,048,576 bytes)",
        ),
    ],
)
def test_file_that_sets_an_unknown_default_is_refused(refused, here, text, said):
    (here / "snapkv.toml").write_text(text)
    message = refused("ask", "log.txt", *QUESTION)
    assert str(here / "snapkv.toml") in message
    assert said in message


def test_unreadable_folder_and_deleted_working_directory_set_no_defaults(here, monkeypatch):
    (here / "snapkv.toml").write_text("budget = 96\n")
    assert read_defaults().keys() == {"budget"}
    real = os.stat

    def refuse(path, *arguments, **options):
        if str(path).endswith(".toml"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr("os.stat", refuse)
        assert read_defaults() == {}
    (here / "gone").mkdir()
    with monkeypatch.context() as patched:
        patched.chdir(here / "gone")
        (here / "gone").rmdir()
        assert read_defaults() == {}
        os.chdir(here)


def test_closed_standard_output_is_one_line_with_json_too():
    code = "import sys; from snapkv_app.cli.app import run; sys.exit(run(['ask', '--json']))"
    done = run_python("-c", code, preexec_fn=lambda: os.close(1))
    assert done.returncode == 1
    assert done.stderr.startswith(
        "snapkv: error: output: standard output is closed. Open standard output"
    )
    assert done.stderr.count("\n") == 1


def test_project_file_without_our_table_sets_nothing(here, origins):
    for text in ("not toml", "tool = 1", "[tool.ruff]"):
        (here / "pyproject.toml").write_text(text)
        assert origins() == {}


def test_default_is_used_unless_the_option_is_typed(snapkv, tiny_only, document, monkeypatch):
    def kept(*typed):
        done = snapkv("ask", document, *QUESTION, "--max-new-tokens", 1, "--json", *typed)
        return round(json.loads(done.out)["runs"][0]["kept_tokens"])

    whole = kept("--policy", "full")
    monkeypatch.setenv("SNAPKV_BUDGET", "48")
    monkeypatch.setenv("SNAPKV_POLICY", "snapkv")
    assert kept() == 48
    assert kept("--budget", 40) == 40
    assert kept("--policy", "h2o") == 48
    assert kept("--policy", "full") == whole
    assert 40 < kept("--keep-ratio", 0.5) != 48


def test_demo_has_no_defaults(monkeypatch):
    from snapkv_app.cli.defaults import defaults_for

    monkeypatch.setenv("SNAPKV_BUDGET", "48")
    assert defaults_for("ask", ["budget"], {}) == {"budget": "48"}
    assert defaults_for("demo", ["budget"], {}) == {}


def test_quiet_prints_the_answer_and_nothing_else(snapkv, tiny_only, document):
    asked = ("ask", document, *QUESTION, *START, "--max-new-tokens", 4)
    loud, quiet = snapkv(*asked), snapkv(*asked, "--quiet")
    assert quiet.err == ""
    assert quiet.out == loud.out != ""
    assert "kept tokens" in loud.err


def test_quiet_prints_errors(snapkv):
    assert "got missing.txt" in snapkv("ask", "missing.txt", *QUESTION, "--quiet").err


@pytest.mark.parametrize(
    ("typed", "code", "argument"),
    [
        (("ask", "missing.txt", *QUESTION), "DocumentError", "file"),
        (("ask", "missing.txt", *QUESTION, "--dtype", "x"), "InvalidArgumentError", "dtype"),
        (("ask", "--unknown"), "InvalidArgumentError", None),
    ],
)
def test_json_output_of_an_error_has_a_code(snapkv, typed, code, argument):
    done = snapkv(*typed, "--json")
    error = json.loads(done.out)["error"]
    assert (done.status, error["code"], error["argument"]) == (2, code, argument)
    assert done.err == f"snapkv: error: {error['message']}\n"
