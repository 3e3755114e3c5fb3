"""What was computed is printed although it cannot be written; one line says which file it was."""

import errno
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from snapkv.cache.saving import writing
from tests.families import tiny_model
from tests.lab.cli.test_eval import NEEDLE
from tests.lab.evaluate.tiny import tiny_loaded

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers on static caches

COMMANDS = [
    ("policies",),
    ("policies", "--json"),
    ("plan", "--context", "8k"),
    ("--help",),
    ("ask", "--help"),
    ("--version",),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tiny(monkeypatch, demo):
    loaded = tiny_loaded(demo.tokenizer)
    monkeypatch.setattr("snapkv.cli.loading.load", lambda **_: loaded)


def require_one_line(done, name):
    assert done.status == 1
    assert f"snapkv: error: output: expected to write '{name}', got: No space left" in done.err
    assert "Traceback" not in done.err
    assert done.err.count("snapkv: error:") == 1


def fill(path):
    """A device that is always full stands where the file would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("/dev/full")


@pytest.mark.parametrize(
    ("full", "options"),
    [
        ("n.svg", ("--plot", "n.svg")),
        ("n-budgets.svg", ("--plot", "n.svg")),
        ("page/index.html", ("--report", "page")),
        ("page/results.csv", ("--report", "page")),
        ("rows/summary.jsonl", ("--results", "rows")),
    ],
)
def test_an_evaluation_is_shown_although_a_file_of_it_is_lost(snapkv, tiny, here, full, options):
    fill(here / full)
    done = snapkv(*NEEDLE, "--budget", "64,40", "--limit", 1, *options)
    require_one_line(done, full)
    assert "needle: accuracy by length" in done.out
    assert not list(here.rglob("*.partial"))


def test_an_answer_that_cannot_be_kept_stops_the_run_which_then_continues(
    snapkv, tiny, here, monkeypatch
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


def test_a_study_is_shown_although_its_figure_is_lost(snapkv, demo_only, document, here):
    fill(here / "figure.svg")
    done = snapkv(
        *("study", "instructions", "--document", document, "--document-tokens", "130"),
        *("--answer-length", "2", "-q", "Where?", "-q", "When?", "--results", "rows"),
        *("--plot", "figure.svg"),
    )
    require_one_line(done, "figure.svg")
    assert "1 and 2" in done.out


@pytest.mark.parametrize("full", ["rows.jsonl", "n.svg"])
def test_a_bench_is_shown_although_a_file_is_lost(snapkv, here, monkeypatch, full):
    loaded = SimpleNamespace(model=tiny_model("llama"), description=lambda: {"name": "tiny"})
    monkeypatch.setattr("snapkv.cli.loading.load", lambda **_: loaded)
    fill(here / full)
    small = ("--lengths", "64", "--budget", "48", "--rounds", "2")
    done = snapkv("bench", "prefill", *small, "--output", "rows.jsonl", "--plot", "n.svg", "--json")
    require_one_line(done, full)
    assert len(json.loads(done.out)["rows"]) == 2
    loaded.model.set_attn_implementation("sdpa")


def test_an_inspection_prints_its_answers_where_its_page_is_lost(snapkv, demo_only, document, here):
    fill(here / "page.html")
    done = snapkv(
        *("inspect", document, "-q", "Where is the key?", "-o", "page.html", "--checks", 0),
        *("--max-new-tokens", 4, "--budget", 64),
    )
    require_one_line(done, "page.html")
    assert [line.partition(":")[0] for line in done.out.splitlines()[:2]] == [
        "full cache",
        "default",
    ]


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_full_standard_output_is_one_line(arguments, unbuffered):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "snapkv", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 1
    assert done.stderr.startswith(
        "snapkv: error: output: expected to write to standard output, got: No space left on device"
    )
    assert done.stderr.count("\n") == 1


def test_where_errors_do_not_fit_either_the_status_says_it():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "snapkv", "ask", "no/such", "-q", "Why?"],
            stderr=full,
            timeout=60,
        )
    assert done.returncode == 2
