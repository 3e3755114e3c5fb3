"""The page of the releases that the package was run with."""

import re
import tomllib
from pathlib import Path

from snapkv_lab.experiments import compatibility
from snapkv_lab.experiments.records import read_rows

ROOT = Path(__file__).parents[5]

pytest_plugins = ["pytester"]


def row(check="release-check", torch="2.13.0+cpu", **changed):
    environment = {"python": "3.11.7", "torch": torch, "transformers": "5.23.0"}
    told = {"commit": "abc", "changed_files": 0}
    return {
        "check": check,
        "outcome": "passed",
        "what": "everything",
        "environment": environment | told,
    } | changed


def test_a_later_row_takes_the_place_of_one_of_the_same_check_and_releases():
    rows = []
    for each in (row(), row("test"), row(torch="2.9.0"), row(outcome="failed")):
        rows = compatibility.note(rows, each)
    found = [(each["check"], each["environment"]["torch"], each["outcome"]) for each in rows]
    assert found == [
        ("release-check", "2.9.0", "passed"),
        ("release-check", "2.13.0+cpu", "failed"),
        ("test", "2.13.0+cpu", "passed"),
    ]


def test_a_row_says_what_was_run_with_what_and_on_which_commit():
    changed = row()["environment"] | {"vllm": "0.32.0", "changed_files": 2}
    page = compatibility.COMPATIBILITY.render([row(), row(environment=changed)])
    cells = "| `make release-check` | 3.11.7 | 2.13.0+cpu | 5.23.0 | {} | passed | everything | abc"
    assert cells.format("") + " |\n" in page
    assert cells.format("0.32.0") + " and changes |\n" in page


def test_every_python_that_the_package_names_has_passed_a_release_check():
    project = tomllib.loads((ROOT / "packages/snapkv/pyproject.toml").read_text("utf-8"))["project"]
    named = re.findall(r"Python :: (3\.\d+)\b", "\n".join(project["classifiers"]))
    rows = [
        each
        for each in read_rows(compatibility.COMPATIBILITY.rows)
        if each["check"] == "release-check"
    ]
    passed = [each["environment"]["python"] for each in rows if each["outcome"] == "passed"]
    assert named
    assert {*named} <= {python.rpartition(".")[0] for python in passed}


def test_a_run_of_tests_notes_how_it_ended(pytester, monkeypatch):
    noted = []
    monkeypatch.setattr(compatibility, "write", noted.append)
    pytester.makepyfile("def test_a(): pass\ndef test_b(): assert False")
    pytester.inline_run("--note-as", "a-target", plugins=[compatibility])
    (found,) = noted
    assert found["check"] == "a-target"
    assert found["outcome"] == "failed"
    assert found["what"] == "1 passed, 1 failed"
    assert found["environment"]["torch"]


def test_vllms_runners_have_a_row_each(pytester, monkeypatch):
    noted = []
    monkeypatch.setattr(compatibility, "write", noted.append)
    pytester.makepyfile("def test_a(): pass")
    for second in ("0", "1", "1"):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", second)
        pytester.inline_run("--note-as", "a-target", plugins=[compatibility])
    rows = []
    for each in noted:
        rows = compatibility.note(rows, each)
    assert [each["what"] for each in rows] == ["1 passed", "1 passed, on vLLM's second runner"]
