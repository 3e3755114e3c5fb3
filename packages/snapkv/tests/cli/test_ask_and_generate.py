"""`snapkv ask` and `snapkv generate` on the demo model."""

import io
import json
import os
import re
import shlex
import sys

import pytest

from snapkv import default_policy
from snapkv.hf.saved import policy_of

ASK = ("-q", "Where is the key?", "--answer-start", "The key is under the")
SMALL = ("--budget", 48, "--window-size", 16, "--kernel-size", 13, "--max-new-tokens", 6)


def test_the_answer_alone_is_on_standard_output(snapkv, demo_only, document):
    done = snapkv("ask", document, *ASK, *SMALL)
    assert done.status == 0
    assert done.out == "The key is under the blue stone.\n"
    costs = dict(re.findall(r"│ ([a-z ]+?) +│ (\S.*?) +│", done.err))
    assert costs["kept tokens"] == f"48 of {costs['prompt tokens']}"  # the budget
    assert costs["generated"] == "4"
    assert costs.keys() == {
        "prompt tokens", "kept tokens", "generated", "lost votes", "cache", "full cache",
        "first token", "per token", "whole answer",
    }  # fmt: skip


def test_json_is_one_object_and_nothing_else(snapkv, demo_only, document):
    done = snapkv("ask", document, *ASK, *SMALL, "--json")
    assert done.status == 0
    assert done.err == ""
    record = json.loads(done.out)
    assert record["model"]["name"] == "demo"
    assert record["documents"] == [str(document)]
    assert record["question"] == "Where is the key?"
    assert record["settings"] == {
        "max_new_tokens": 6,
        "temperature": 0.0,
        "seed": 0,
        "min_new_tokens": 0,
        "stop_token_ids": [],
        "stop_strings": [],
    }
    (answer,) = record["runs"]
    assert answer["text"] == "The key is under the blue stone."
    assert answer["policy"]["kernel_size"] == 13
    assert answer["kept_tokens"] == 48
    assert answer["cache"]["held_bytes"] < answer["cache"]["full_bytes"]
    assert next(iter(record)) == "answer"
    assert record["answer"] == answer["text"]
    assert "layers" not in answer["cache"]
    detailed = json.loads(snapkv("ask", document, *ASK, *SMALL, "--json", "--verbose").out)
    assert len(detailed["runs"][0]["cache"]["layers"]) == 30


def test_a_method_that_reads_twice_chooses_before_the_question(snapkv, demo_only, document):
    options = ("--policy", "kvzip", "--budget", 128, "--window-size", 16, "--max-new-tokens", 6)
    done = snapkv("ask", document, *ASK, *options, "--json")
    assert done.status == 0, done.err
    (answer,) = json.loads(done.out)["runs"]
    assert answer["text"] == "The key is under the blue stone."
    behind = answer["cache"]["seen_tokens"] - answer["prompt_tokens"]
    asked = answer["cache"]["kept_tokens"] - 128  # the question and what follows are read after it
    assert 10 < asked - behind < 40
    done = snapkv("ask", document, *ASK, *options, "--self-speculate")
    assert done.status == 2
    assert "drafts: expected none with kvzip" in done.err
    done = snapkv("generate", document, "--policy", "kvzip")
    assert done.status == 2
    assert "policy: expected one that chooses when a prompt has been read once" in done.err
    assert "snapkv ask does" in done.err


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("output", [(), ("--json",)], ids=["text", "json"])
def test_names_and_answers_that_the_terminal_cannot_show(
    snapkv, demo_only, tmp_path, monkeypatch, encoding, output
):
    for name in (b"caf\xe9.txt", b"notes.txt"):
        (tmp_path / os.fsdecode(name)).write_text("Nothing to see here.")
    written = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", written)
    start = ("--answer-start", "Ω is", "--max-new-tokens", 1)
    done = snapkv("ask", tmp_path, "-q", "Why?", *start, *output)
    assert done.status == 0
    text = written.buffer.getvalue().decode(encoding)
    if output:
        record = json.loads(text)
        assert record["documents"][0] == f"{tmp_path}/caf\\xe9.txt"
        assert record["runs"][0]["text"].startswith("Ω is")
    else:
        assert text.startswith("Ω is" if encoding == "utf-8" else "\\u03a9 is")


def test_compare_shows_both_caches_side_by_side(snapkv, demo_only, document, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    done = snapkv("ask", document, *ASK, *SMALL, "--compare")
    assert done.status == 0
    assert done.err == ""
    header, answers = [
        line for line in done.out.splitlines() if "snapkv" in line or "stone" in line
    ]
    assert "full" in header
    assert answers.count("The key is under the blue stone.") == 2
    assert done.out.splitlines()[-1] == "same answer"


def test_the_default_is_not_called_by_the_papers_name_and_json_has_all_of_it(
    snapkv, demo_only, document
):
    usual = ("ask", document, *ASK, "--budget", 48, "--max-new-tokens", 2)
    shown = snapkv(*usual, "--compare").out
    assert "default" in shown.splitlines()[1]
    assert "snapkv" not in shown
    (run,) = json.loads(snapkv(*usual, "--json").out)["runs"]
    assert run["method"] == "default"
    assert policy_of(run["policy"]) == default_policy(48)


def test_compare_in_json_is_a_run_per_cache(snapkv, demo_only, document):
    done = snapkv("ask", document, *ASK, *SMALL, "--compare", "--json")
    compressed, full = json.loads(done.out)["runs"]
    assert [compressed["policy"]["name"], full["policy"]["name"]] == ["snapkv", "full"]
    assert compressed["prompt_tokens"] == full["prompt_tokens"]
    assert full["cache"]["held_bytes"] == full["cache"]["full_bytes"]
    assert compressed["token_ids"] == full["token_ids"]
    assert json.loads(done.out)["comparison"]["same"]


@pytest.fixture
def gate(tmp_path):
    """A document whose number a small budget loses, and the command that asks for it."""
    things = [(place, thing) for place in ("door", "bridge") for thing in ("rain", "crowd", "fog")]
    scenes = [
        f"The {who} waited by the {place} until the {thing} had gone."
        for who in ("baker", "sailor")
        for place, thing in things
    ]
    document = tmp_path / "the gate.txt"
    document.write_text(" ".join([*scenes[:6], "The number of the gate is 4815162.", *scenes[6:]]))
    small = ("--policy", "snapkv", "--budget", 32, "--window-size", 8, "--max-new-tokens", 8)
    start = ("-q", "What is the number of the gate?", "--answer-start", "The number of the gate is")
    return "ask", document, *start, *small


def test_the_command_that_is_next_to_try_keeps_the_answer(snapkv, demo_only, gate):
    compared = snapkv(*gate, "--compare", "--json")
    found = json.loads(compared.out)["comparison"]
    assert compared.status == 0
    assert not found["same"]
    program, *words = shlex.split(found["command"])
    assert program == "snapkv"
    assert words[:2] == ["ask", str(gate[1])]
    again = json.loads(snapkv(*words).out)
    assert again["comparison"]["same"]
    assert again["runs"][0]["policy"]["name"] == ("snapkv" if found["remedy"] else "full")


def test_what_differs_and_what_to_try_stand_below_the_table(snapkv, demo_only, gate, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    done = snapkv(*gate, "--compare", "--temperature", 0.01)
    assert done.status == 0
    differ, untold = done.out.splitlines()[-2:]
    assert differ.startswith("different: The number of the gate is")
    assert "[-" in differ or "{+" in differ
    assert untold == (
        "what to try next is not computed: the answers are drawn, at temperature 0.01"
    )


def test_a_check_compares_the_first_tokens_and_says_so_by_its_status(snapkv, demo_only, gate):
    same = snapkv(*gate, "--check", 1)
    assert same.status == 0
    assert same.err.splitlines()[-1] == "check: the first token is the full cache's"
    differs = snapkv(*gate, "--check", 8, "--json")
    assert differs.status == 3
    check = json.loads(differs.out)["check"]
    assert check["tokens"] == 8
    assert not check["same"]
    assert 0 < check["first_difference"] < 8
    first = check["first_difference"]
    assert snapkv(*gate, "--check", first).status == 0
    assert snapkv(*gate, "--check", first + 1).status == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--temperature", 0.5), "check: expected temperature 0"),
        (("--max-new-tokens", 3), "check: expected at most max_new_tokens=3, got 4"),
    ],
)
def test_a_check_that_could_not_tell_is_refused(snapkv, document, options, says):
    for command in (("ask", document, "-q", "Why?"), ("generate", "-p", "Why?")):
        done = snapkv(*command, "--check", 4, *options)
        assert done.status == 2
        assert says in done.err


def test_a_conversation_has_no_check(snapkv, document):
    done = snapkv("chat", document, "--check", 4)
    assert done.status == 2
    assert "check: expected it with ask, got it with chat" in done.err


def test_a_method_that_looks_at_tokens_gets_them_from_the_models_tokenizer(
    snapkv, demo_only, document
):
    fastgen = ("--policy", "fastgen", "--set", "recovery=0.9", "--max-new-tokens", 6)
    done = snapkv("ask", document, *ASK, *fastgen, "--compare", "--json")
    assert done.status == 0
    own, full = json.loads(done.out)["runs"]
    assert own["policy"] == {
        "name": "fastgen", "recovery": 0.9, "local_ratio": 0.3, "frequent_ratio": 0.3,
        "special_ids": 17, "punctuation_ids": 825,
    }  # fmt: skip
    assert own["cache"]["held_bytes"] < own["cache"]["full_bytes"] == full["cache"]["held_bytes"]
    assert own["text"].startswith("The key is under the")


def test_standard_input_and_a_file_are_asked_together(snapkv, demo_only, document, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"The moon is green.")))
    done = snapkv("ask", "-", document, "-q", "What is green?", "--max-new-tokens", 1, "--json")
    assert json.loads(done.out)["documents"] == ["standard input", str(document)]


def test_generate_continues_files_and_prompt_as_they_are(snapkv, demo_only, document):
    options = ("--answer-start", " the", *SMALL, "--json")
    done = snapkv("generate", document, "--prompt", "The key is under", *options)
    (answer,) = json.loads(done.out)["runs"]
    assert answer["text"].startswith(" the blue stone")


def test_generate_sends_a_message_when_asked_to_chat(snapkv, demo_only):
    done = snapkv("generate", "-p", "Say hello.", "--chat", "--max-new-tokens", 3, "--json")
    plain = snapkv("generate", "-p", "Say hello.", "--max-new-tokens", 3, "--json")
    chat_tokens, plain_tokens = (
        json.loads(finished.out)["runs"][0]["prompt_tokens"] for finished in (done, plain)
    )
    assert chat_tokens > plain_tokens + 10


def test_only_options_that_were_given_reach_the_loader(snapkv, demo_only):
    snapkv("generate", "-p", "Hi", "--max-new-tokens", 1)
    snapkv("generate", "-p", "Hi", "--max-new-tokens", 1, "--model", "x", "--dtype", "float32")
    assert demo_only == [{}, {"name": "x", "dtype": "float32"}]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_drawn_on_terminals_only(snapkv, demo_only, monkeypatch, terminal):
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TTY_COMPATIBLE", "1")
    done = snapkv("generate", "-p", "Hi", "--max-new-tokens", 1, "--json")
    json.loads(done.out)
    assert ("reading the prompt" in done.err) == terminal
