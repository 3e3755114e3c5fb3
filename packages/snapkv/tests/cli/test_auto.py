"""A budget that the votes choose, on the command line: what it kept is said, and why."""

import io
import json
import sys

import pytest

ASK = ("-q", "Where is the key?", "--answer-start", "The key is under the")
SHORT = ("--max-new-tokens", 4)


def asked(snapkv, document, *more):
    done = snapkv("ask", document, *ASK, *SHORT, *more)
    assert done.status == 0, done.err
    return done


def test_json_says_the_rule_and_what_it_kept(snapkv, demo_only, document):
    record = json.loads(asked(snapkv, document, "--json", "--verbose").out)
    (run,) = record["runs"]
    auto = {"lost_vote": 0.0015, "least": 32, "most": None}
    assert run["policy"]["budget"] == {"auto": auto}
    behind = run["cache"]["seen_tokens"] - run["prompt_tokens"]
    kept = [layer["kept_tokens"] - behind for layer in run["cache"]["layers"]]
    assert record["budget"] == {
        "auto": auto,
        "kept_tokens": pytest.approx(sum(kept) / len(kept)),
        "least": min(kept),
        "most": max(kept),
    }
    assert 16 + 32 <= min(kept) < max(kept) <= run["prompt_tokens"]


def test_a_line_below_the_table_says_it(snapkv, demo_only, document):
    done = asked(snapkv, document, "--budget", "auto:lost_vote=0.01")
    _, line = " ".join(done.err.split()).split("budget auto: ")
    assert " prompt tokens kept in each layer (" in line
    assert "gave a pooled vote of more than 1 %" in line
    assert "no more than" not in line
    limited = asked(snapkv, document, "--budget", "auto:least=8,most=60")
    assert "than 0.15 %, but no more than 60" in " ".join(limited.err.split())


def test_nothing_is_said_of_a_number(snapkv, demo_only, document):
    assert "budget auto" not in asked(snapkv, document, "--budget", 64).err
    assert "budget" not in json.loads(asked(snapkv, document, "--budget", 64, "--json").out)


def test_a_short_prompt_loses_nothing(snapkv, demo_only):
    done = snapkv("generate", "-p", "The key is", "--max-new-tokens", 2)
    assert done.status == 0
    assert "budget auto: nothing was dropped" in done.err


@pytest.mark.parametrize("recall", [(), ("--recall", "none")], ids=["host", "none"])
def test_a_chat_needs_no_budget(snapkv, demo_only, document, monkeypatch, recall):
    lines = "Where is the key?\nWhen does the gate open?\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    done = snapkv("chat", document, *recall, *SHORT, "--json")
    assert done.err == ""
    first, second = [json.loads(line) for line in done.out.splitlines()]
    budget = 1024 if recall else {"auto": {"lost_vote": 0.0015, "least": 32, "most": None}}
    assert first["policy"]["budget"] == second["policy"]["budget"] == budget
    assert (second["cache"]["host_bytes"] > 0) == (not recall)


def test_a_page_is_made_of_it(snapkv, demo_only, document, tmp_path):
    page = tmp_path / "page.html"
    done = snapkv("inspect", document, *ASK, *SHORT, "--checks", 2, "--output", page)
    assert done.status == 0, done.err
    assert page.stat().st_size > 10_000


def test_a_plan_asks_for_a_number(snapkv):
    done = snapkv("plan", "--context", "8k", "--budget", "auto")
    assert done.status == 2
    assert "budget: expected a whole number such as 4096" in done.err
