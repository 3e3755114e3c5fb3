"""docs/programs.md: the keys of every command's `--json`, and the exit statuses."""

import json
import re
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from snapkv_app.cli import app, interrupts, notes, standard_output
from tests.cli.commands import options_of
from tests.lab.cli.test_eval import NEEDLE

PAGE = (Path(__file__).parents[4] / "docs" / "programs.md").read_text("utf-8")
ROWS = dict(re.findall(r"^\| ([^-\n].*?) \| (.*) \|$", PAGE, re.MULTILINE))
ASK = ("-q", "Where is the key?", "--max-new-tokens", 3, "--json")
NOT_RUN = {"`eval lm-eval`", "`medusa train`"}
"""Another package's data, and minutes of training."""


def keys(text):
    return re.findall("`([^`]+)`", text)


@pytest.fixture
def printed(snapkv):
    """Call it with a command line; what its JSON object has."""

    def call(*words):
        done = snapkv(*words)
        assert done.status in (0, 1, 3), done.err
        return json.loads(done.out)

    return call


@pytest.fixture
def chatted(snapkv, document, monkeypatch):
    """The objects that `chat --json` prints, a line each."""
    typed = b"Where is the key?\n/stats\n/drop document\n"
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(typed)))
    done = snapkv("chat", document, "--max-new-tokens", 3, "--json")
    return [json.loads(line) for line in done.out.splitlines()]


def test_every_command_prints_the_documented_keys(
    printed, tiny_only, here, document, chatted, monkeypatch
):
    long = here / "long.txt"
    long.write_text("The key is here. " * 400)
    asked = printed("ask", document, *ASK, "--budget", 48, "--compare", "--check", 2)
    within = printed("ask", document, *ASK, "--budget", "30%", "--prompt-lookup", 2)
    passages = printed("ask", long, *ASK, "--passages", "1k")["passages"]
    generated = printed("generate", "-p", "Hi", "--max-new-tokens", 2, "--json")
    (run, full), (lookup,) = asked["runs"], within["runs"]
    added = printed("library", "add", document, "--json")
    listed = printed("library", "list", "snapkv-library", "--json")
    found = printed("ask", "--library", "snapkv-library", *ASK)
    for file in (here / "snapkv-library" / "caches").iterdir():
        file.write_bytes(b"")
    damaged = printed("library", "check", "snapkv-library", "--json")
    limited = printed("library", "limit", "snapkv-library", "none", "--json")
    removed = printed("library", "remove", "snapkv-library", document, "--json")
    monkeypatch.setenv("SNAPKV_BUDGET", "64")
    plan = printed("plan", "--model", "llama-3.1-8b", "--context", "8k", "--json")
    said, stats, dropped = chatted
    assert asked.keys() == within.keys() == generated.keys() == found.keys()
    assert run.keys() == full.keys() == said.keys() - {"question", "warnings"}
    assert run["cache"].keys() == full["cache"].keys() == stats["stats"].keys() - {"layers"}
    assert plan["full"].keys() == plan["compressed"].keys()
    shown = {
        "`ask`, `generate`": asked,
        "`chat`, a line for each answer": ["question", "warnings", "runs"],
        "`chat`, `/stats` and `/drop`": [*stats, "cache", *dropped],
        "`plan`": plan,
        "`plan --shapes`, for each shape": printed("plan", "--shapes", "--json")["lwm-7b"],
        "`config`, for each option": printed("config", "--json")["budget"],
        "`policies`, for each method": printed("policies", "--json")["snapkv"],
        "`library add`": added,
        "`library list`": listed,
        "`library check`": damaged,
        "`library limit`": limited,
        "`library remove`": removed,
        "`eval TASK`, `study NAME`": printed(*NEEDLE, "--budget", 64, "--limit", 1, "--json"),
        "`bench`": printed("bench", "decode", "--lengths", 64, "--budget", 48, "--json"),
        "`ask`: `model`": asked["model"],
        "`ask`: `settings`": asked["settings"],
        "`ask`: each of `sources`": found["sources"][0],
        "`ask`: `passages`": [*passages, *passages["places"][0]],
        "`ask`: each of `runs`": run,
        "`runs`: `cache`": run["cache"],
        "`runs`: `drafts`": lookup["drafts"],
        "`ask`: `lost_votes`": asked["lost_votes"],
        "`ask`: `comparison`": asked["comparison"],
        "`ask`: `check`": asked["check"],
        "`ask`: `bits`": within["bits"],
        "`library add`: each of `documents`": added["documents"][0],
        "`library list`: each of `documents`": listed["documents"][0],
        "`library check`: each of `damaged`": damaged["damaged"][0],
        "`plan`: `request`": plan["request"],
        "`plan`: `footprint`": plan["footprint"],
        "`plan`: `full`, `compressed`": plan["full"],
    }
    documented = {name: keys(text) for name, text in ROWS.items() if "`" in name}
    assert {name: sorted(told) for name, told in shown.items()} == {
        name: sorted(told) for name, told in documented.items() if name not in NOT_RUN
    }
    assert documented.keys() - shown.keys() == NOT_RUN


def test_every_command_with_json_has_a_documented_row():
    named = " ".join(name for name in ROWS if ":" not in name)
    groups = {"eval": "eval TASK", "study": "study NAME", "bench": "bench"}
    for command, _ in options_of(lambda option: option.name == "json"):
        words = groups.get(command.words[0], str(command))
        assert f"`{words}`" in named, str(command)


def test_list_of_numbers_is_written_on_one_line(snapkv, tiny_only, document):
    done = snapkv("ask", document, *ASK)
    ids = json.loads(done.out)["runs"][0]["token_ids"]
    assert f'"token_ids": [{", ".join(map(str, ids))}]' in done.out
    assert len(ids) > 1


def test_exit_statuses_equal_the_documented_ones():
    statuses = {int(name) for name in ROWS if name.isdecimal()}
    ours = {app._FAILURE, standard_output.FAILED, app._BAD_INPUT, notes.DIFFERS}
    assert statuses == {0, interrupts.INTERRUPTED, *ours}
