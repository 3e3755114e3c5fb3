"""`snapkv ask` and `snapkv generate`: answers, tables, comparisons, drafts and prefills."""

import io
import json
import os
import re
import shlex
import sys

import pytest

from snapkv import default_policy
from snapkv.errors import InvalidArgumentError
from snapkv.hf import step_graph
from snapkv.hf.saved import policy_of
from snapkv_app.cli.notes import SAME
from snapkv_app.cli.options import RunOptions, read_prefill, read_prefills
from snapkv_app.cli.policy import usual_bits
from snapkv_app.prefills import Exact, LayerByLayer
from tests.families import small_model

WHERE = ("-q", "Where is the key?")
ASK = (*WHERE, "--answer-start", "The key is under the")
SMALL = ("--budget", 48, "--window-size", 16, "--kernel-size", 13, "--max-new-tokens", 6)
AUTO = {"auto": {"lost_vote": 0.0015, "least": 32, "most": None}}


def is_of_demo(said):
    """Whether that is the line about the demo model, once."""
    return said.startswith("snapkv: this is the demo model, a small") and said.count("\n") == 1


@pytest.fixture
def asked(snapkv, document):
    """The JSON of a question about the document."""

    def ask(*options):
        done = snapkv("ask", document, *ASK, *options, "--json")
        assert done.status == 0, done.err
        assert done.err == "" or is_of_demo(done.err)
        return json.loads(done.out)

    return ask


def test_standard_output_has_only_the_answer(snapkv, demo_only, document):
    done = snapkv("ask", document, *ASK, *SMALL)
    assert (done.status, done.out) == (0, "The key is under the blue stone.\n")
    costs = dict(re.findall(r"│ ([a-z ]+?) +│ (\S.*?) +│", done.err))
    assert costs["kept tokens"] == f"48 of {costs['prompt tokens']}"  # the budget
    assert costs["generated"] == "4"
    assert costs.keys() == {
        "prompt tokens", "kept tokens", "generated", "lost votes", "cache", "full cache",
        "first token", "per token", "whole answer",
    }  # fmt: skip


def test_table_shows_how_the_decode_steps_ran(snapkv, demo_only, document, monkeypatch):
    monkeypatch.setattr(step_graph, "described", lambda cache: "one graph")
    assert re.search(r"│ steps +│ one graph", snapkv("ask", document, *ASK, *SMALL).err)


def test_standard_output_has_only_one_json_object(asked, demo_only, document):
    record = asked(*SMALL)
    assert list(record)[:4] == ["answer", "model", "question", "prompt"]
    assert {name for name, value in record.items() if value is None} == {
        "prompt", "library", "sources", "recompute", "passages", "comparison", "check",
    }  # fmt: skip
    assert record["model"]["name"] == "demo"
    assert record["documents"] == [str(document)]
    assert record["question"] == "Where is the key?"
    assert record["warnings"] == []
    assert record["settings"] == {
        "max_new_tokens": 6, "temperature": 0.0, "seed": 0, "min_new_tokens": 0,
        "stop_token_ids": [], "stop_strings": [],
    }  # fmt: skip
    (answer,) = record["runs"]
    assert record["answer"] == answer["text"] == "The key is under the blue stone."
    assert answer["policy"]["policy"]["kernel_size"] == 13
    assert answer["kept_tokens"] == 48
    assert answer["cache"]["held_bytes"] < answer["cache"]["full_bytes"]
    assert "layers" not in answer["cache"]
    assert len(asked(*SMALL, "--verbose")["runs"][0]["cache"]["layers"]) == 30


def test_method_that_reads_twice_selects_before_the_question(asked, tiny_only):
    options = ("--policy", "kvzip", "--budget", 128, "--window-size", 16, "--max-new-tokens", 6)
    (answer,) = asked(*options)["runs"]
    behind = answer["cache"]["seen_tokens"] - answer["prompt_tokens"]
    question = answer["cache"]["kept_tokens"] - 128  # it and what follows are read after it
    assert 10 < question - behind < 40


@pytest.mark.parametrize(
    ("encoding", "output"), [("utf-8", ()), ("ascii", ()), ("ascii", ("--json",))], ids=str
)
def test_unencodable_names_and_answers_are_escaped(
    snapkv, tiny_only, tmp_path, monkeypatch, encoding, output
):
    for name in (b"caf\xe9.txt", b"notes.txt"):
        (tmp_path / os.fsdecode(name)).write_text("Nothing to see here.")
    written = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", written)
    start = ("--answer-start", "Ω is", "--max-new-tokens", 1)
    assert snapkv("ask", tmp_path, "-q", "Why?", *start, *output).status == 0
    text = written.buffer.getvalue().decode(encoding)
    if output:
        record = json.loads(text)
        assert record["documents"][0] == f"{tmp_path}/caf\\xe9.txt"
        assert record["runs"][0]["text"].startswith("Ω is")
    else:
        assert text.startswith("Ω is" if encoding == "utf-8" else "\\u03a9 is")


@pytest.mark.parametrize("terminal", [True, False])
def test_control_characters_are_escaped_on_a_terminal(
    snapkv, tiny_only, here, monkeypatch, terminal
):
    (here / "notes.txt").write_text("Nothing to see here.")
    (here / "\x1b]0;a.doc").write_bytes(b"\0")
    written = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    written.isatty = lambda: terminal
    start = ("--answer-start", "Say \x1b]0;b\x07", "--max-new-tokens", 1)
    for more in ((), ("--compare",)):
        monkeypatch.setattr(sys, "stdout", written)
        done = snapkv("ask", here, "-q", "Why?", *start, *more)
        assert "skipped: " in done.err
        assert "\x1b]" not in done.err
    text = written.buffer.getvalue().decode()
    assert text.startswith("Say \\x1b]0;b\\x07" if terminal else "Say \x1b]0;b\x07")
    assert text.count("\x1b]0") == (0 if terminal else 1)  # and never in a table
    assert "\x1b" not in snapkv("ask", "\x1b]0;a.txt", "-q", "Why?").err


def test_compare_shows_both_answers_side_by_side(snapkv, asked, demo_only, document, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    done = snapkv("ask", document, *ASK, *SMALL, "--compare")
    assert done.status == 0
    assert is_of_demo(done.err)
    _, header, *_ = done.out.splitlines()
    assert "across-layers" in header
    assert "full" in header
    assert done.out.count("The key is under the blue stone.") == 2
    assert done.out.splitlines()[-1] == SAME
    record = asked(*SMALL, "--compare")
    compressed, full = record["runs"]
    assert [compressed["policy"]["name"], full["policy"]["name"]] == ["across-layers", "full"]
    assert full["cache"]["held_bytes"] == full["cache"]["full_bytes"]
    assert compressed["token_ids"] == full["token_ids"]
    assert record["comparison"]["same"]


def test_default_method_is_not_called_snapkv(snapkv, asked, tiny_only, document):
    shown = snapkv("ask", document, *ASK, "--budget", 48, "--max-new-tokens", 2, "--compare").out
    assert "default" in shown.splitlines()[1]
    assert "snapkv" not in shown.splitlines()[1]
    (run,) = asked("--budget", 48, "--max-new-tokens", 2)["runs"]
    assert run["method"] == "default"
    assert policy_of(run["policy"]) == default_policy(48, voters=16)  # the question's tokens


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


def test_suggested_commands_double_the_budget_up_to_the_prompt(snapkv, demo_only, gate):
    budgets, words = [], [*map(str, gate), "--compare", "--json"]
    while command := (record := json.loads(snapkv(*words).out))["comparison"]["command"]:
        program, *words = shlex.split(command)
        assert (program, *words[:2]) == ("snapkv", "ask", str(gate[1]))
        budgets.append(record["runs"][0]["policy"]["budget"])
    assert budgets == [32 * 2**step for step in range(len(budgets))] != []
    own, full = record["runs"]
    assert record["comparison"]["same"] or 2 * own["cache"]["kept_tokens"] > full["prompt_tokens"]


def test_check_compares_the_first_tokens_and_sets_the_exit_status(snapkv, demo_only, gate):
    differs = snapkv(*gate, "--check", 8, "--json")
    assert differs.status == 3
    check = json.loads(differs.out)["check"]
    first = check["first_difference"]
    assert check == {"tokens": 8, "same": False, "first_difference": first}
    assert 0 < first < 8
    same = snapkv(*gate, "--check", first)
    assert same.status == 0
    assert any(line.endswith("the full cache's") for line in same.err.splitlines())


def test_method_that_needs_token_ids_gets_the_models_tokenizer(asked, tiny_only):
    fastgen = ("--policy", "fastgen", "--set", "recovery=0.9", "--max-new-tokens", 6)
    (own,) = asked(*fastgen)["runs"]
    assert own["policy"] == {
        "name": "fastgen", "recovery": 0.9, "local_ratio": 0.3, "frequent_ratio": 0.3,
        "special_ids": 17, "punctuation_ids": 825,
    }  # fmt: skip


def test_generate_continues_files_and_prompt_unchanged(snapkv, demo_only, document, monkeypatch):
    options = ("--answer-start", " the", *SMALL, "--json")
    done = snapkv("generate", document, "--prompt", "The key is under", *options)
    assert json.loads(done.out)["answer"].startswith(" the blue stone")
    hello = ("generate", "-p", "Say hello.", "--max-new-tokens", 1, "--json")
    plain, chat = (json.loads(snapkv(*hello, *way).out)["runs"][0] for way in ((), ("--chat",)))
    assert chat["prompt_tokens"] > plain["prompt_tokens"] + 10
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"The moon is green.")))
    done = snapkv("ask", "-", document, "-q", "What is green?", "--max-new-tokens", 1, "--json")
    assert json.loads(done.out)["documents"] == ["standard input", str(document)]


def test_only_given_options_reach_the_loader(snapkv, tiny_only):
    snapkv("generate", "-p", "Hi", "--max-new-tokens", 1)
    snapkv("generate", "-p", "Hi", "--max-new-tokens", 1, "--model", "x", "--dtype", "float32")
    assert tiny_only == [{}, {"name": "x", "dtype": "float32"}]


@pytest.mark.parametrize(
    ("terminal", "draws", "as_json"),
    [(True, True, True), (True, True, False), (True, False, False), (False, False, True)],
)
def test_progress_is_drawn_only_on_terminals(
    snapkv, tiny_only, document, monkeypatch, terminal, draws, as_json
):
    """Loading is reported first, then the tokens read, with a streamed answer, too."""
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TTY_COMPATIBLE", "1")
        monkeypatch.setenv("TERM", "xterm" if draws else "dumb")
    record = ("--json",) if as_json else ()
    done = snapkv("ask", document, *ASK, "--max-new-tokens", 1, "--compare", *record)
    drawn = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", done.err)
    assert drawn.startswith("snapkv: loading the demo model\n") == terminal
    for method in ("default", "full"):
        assert (f"reading ({method})" in drawn) == draws
    one = snapkv("ask", document, *ASK, "--max-new-tokens", 4, *record)
    assert bool(re.search(r"(\d+) of \1 tokens", one.err)) == draws
    assert draws or one.err.removeprefix("snapkv: loading the demo model\n")[:1] != "\n"


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ((), "32"),
        (("--keep-ratio", 0.3), "32"),
        (("--budget", "30%"), "8/4"),
        (("--budget", "100kB"), "8/4"),
        (("--budget", "80%", "--exact-bits"), "32"),
        (("--budget", "80%", "--policy", "snapkv"), "32"),
    ],
)
def test_default_method_quantizes_only_for_a_budget_in_bytes(asked, tiny_only, options, bits):
    (run,) = asked("--max-new-tokens", 2, *options)["runs"]
    assert list(run["cache"]["bits"]) == [bits]


def test_low_budget_suggests_a_larger_one(snapkv, tiny_only, document):
    done = snapkv("ask", document, *ASK, "--max-new-tokens", 1, "--budget", 48)
    command = " ".join(done.err.split()).partition("for a larger budget: ")[2]
    assert command.endswith("--budget 96")
    assert "96 of" in snapkv(*shlex.split(command)[1:]).err


def test_shared_latent_stays_unquantized_with_a_reason():
    latent, other, within = small_model("latent"), small_model("llama"), default_policy("30%")
    assert usual_bits(within, other) == ("K8V4", "")
    assert usual_bits(default_policy("3%"), other) == ("int4", "")
    assert usual_bits(default_policy("1KiB"), other) == ("K8V4", "")
    assert usual_bits(within, latent) == (
        None,
        "unquantized, since all heads of this model share one latent",
    )
    for policy, options in (
        (default_policy(), RunOptions()),
        (within, RunOptions(exact_bits=True)),
    ):
        assert usual_bits(policy, latent, options) == (None, "")


WAYS = {
    "assistant": ("--assistant", "demo"),
    "prompt-lookup": ("--prompt-lookup", 3),
}


@pytest.mark.parametrize("way", WAYS)
def test_drafts_do_not_change_the_answer(asked, demo_only, way):
    (answer,) = asked(*SMALL, *WAYS[way])["runs"]
    assert answer["text"] == "The key is under the blue stone."
    drafts = answer["drafts"]
    assert drafts["method"] == way
    assert 1 <= drafts["passes"] <= 5
    assert drafts["acceptance_length"] >= 1.01


def test_table_shows_tokens_per_pass(snapkv, tiny_only, document, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    done = snapkv("ask", document, *ASK, *SMALL, "--prompt-lookup", 3, "--compare")
    (line,) = [line for line in done.out.splitlines() if "tokens per pass" in line]
    assert "(prompt-lookup)" in line
    assert line.split("│")[-2].strip() == "-"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("exact", Exact()),
        ("layer-by-layer", LayerByLayer()),
        ("layer-by-layer:chunk_tokens=2k", LayerByLayer(chunk_tokens=2048)),
        ("layer-by-layer:chunk-tokens=96", LayerByLayer(chunk_tokens=96)),
    ],
)
def test_prefill_with_parameters_is_parsed(text, expected):
    assert read_prefill(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layer-by-leyer", "Did you mean layer-by-layer"),
        ("selective", "prefill: expected one of exact, layer-by-layer, but got 'selective'"),
        ("", "prefill: expected one of exact"),
        ("exact:layer=3", "expected exact with no parameters"),
        ("layer-by-layer:chunk_token=3", "Did you mean chunk_tokens"),
        ("layer-by-layer:chunk_tokens", "as NAME=VALUE"),
        ("layer-by-layer:chunk_tokens=0", "chunk_tokens: expected"),
        ("layer-by-layer:chunk_tokens=few", "--prefill layer-by-layer:chunk_tokens=4k"),
        ("layer-by-layer:chunk_tokens=1,chunk_tokens=2", "every parameter can be set only once"),
    ],
)
def test_wrong_prefill_is_refused_in_one_line(text, message):
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        read_prefill(text)
    assert "\n" not in str(caught.value)
    with pytest.raises(
        InvalidArgumentError, match="every way to read prompts can be used only once"
    ):
        read_prefills(["exact", "exact"])


def test_ask_uses_the_prefill_option(snapkv, asked, demo_only, document):
    in_pieces = (*SMALL, "--prefill", "layer-by-layer:chunk_tokens=64")
    done = snapkv("ask", document, *ASK, *in_pieces)
    record = asked(*in_pieces, "--compare", "--verbose")
    ours, full = record["runs"]
    assert record["prefill"] == {"name": "layer-by-layer", "chunk_tokens": 64}
    assert ours["text"] == done.out.strip()
    assert ours["text"] == asked(*SMALL)["runs"][0]["text"]  # it is exact
    assert full["cache"]["kept_tokens"] == full["cache"]["seen_tokens"]
