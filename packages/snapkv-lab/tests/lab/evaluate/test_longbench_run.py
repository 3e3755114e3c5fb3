"""`snapkv eval longbench` from rows in LongBench's schema to the table.

A tiny random model reads the demo's tokens, except in the one test that asks the demo model.
"""

import copy
import json
from dataclasses import replace

import pytest

from snapkv.app.settings import GenerationSettings
from snapkv.cli.app import run
from snapkv_lab.evaluate.sample import Sample
from tests.lab.evaluate.test_longbench import TEXT, row, write
from tests.lab.evaluate.tiny import tiny_loaded

NAMES = ("trec", "samsum")

MISTRAL = "mistralai/Mistral-7B-Instruct-v0.2"


@pytest.fixture
def data(tmp_path):
    for name in NAMES:
        write(tmp_path / "data", name, row(name, context=TEXT * 20), row(name))
    return tmp_path / "data"


@pytest.fixture(scope="module")
def tiny(demo):
    return tiny_loaded(demo.tokenizer, positions=8192)


@pytest.fixture
def evaluate(tiny, data, tmp_path, monkeypatch, capsys):
    """Run the command on a model; returns its status and what it printed."""

    def call(*options, loaded=tiny, datasets=NAMES):
        monkeypatch.setattr("snapkv.cli.loading.load", lambda **_: loaded)
        command = ["eval", "longbench", "--data", str(data), "--results", str(tmp_path / "out")]
        command += ["--policy", "snapkv"]  # as the paper has it
        status = run([*command, "--datasets", ",".join(datasets), "--budget", "64", *options])
        return status, capsys.readouterr().out

    return call


def test_one_command_answers_and_scores_every_set(evaluate, tmp_path):
    status, out = evaluate("--json")
    assert status == 0
    found = json.loads(out)
    settings = found["run"]["task"]
    assert settings["max_prompt_tokens"] == 8192 - 512 - 256
    assert {(r["method"], r["cell"]["dataset"], r["samples"]) for r in found["rows"]} == {
        (method, name, 2) for method in ("full", "snapkv@64") for name in NAMES
    }
    lines = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == 2 * 2 * len(NAMES)
    for record in records:
        data_set = record["cell"]["dataset"]
        if data_set == "samsum":
            assert "\n" not in record["prediction"].rstrip("\n")
        if record["method"] == "snapkv@64":
            assert record["kept_tokens"] <= 64 + record["new_tokens"]
        assert 0 <= record["score"] <= 1
    assert evaluate("--json")[1] == out, "a second run answers nothing anew"


def test_the_table_shows_what_the_paper_measured_with_the_model(evaluate, tiny, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    status, out = evaluate("--limit", "1", "--baseline", "none", loaded=replace(tiny, name=MISTRAL))
    assert status == 0
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    rows = {cells[0]: cells for cells in lines if cells}
    assert rows["paper: full"][2:5] == ["71.0", "43.0", "57.0"]
    assert rows["paper: h2o@4096"][2:4] == ["70.5", "43.0"]
    assert len(rows["snapkv@64"]) == len(rows["paper: full"])


# The template of the paper's run


def sample(**changed):
    settings = GenerationSettings(max_new_tokens=1)
    values = {
        "name": "a",
        "cell": {},
        "context": "Text. ",
        "question": "Why?",
        "references": ("b",),
    }
    return Sample(**values, settings=settings, **changed)


@pytest.mark.parametrize(
    ("model", "before", "behind"),
    [
        (MISTRAL, "", ""),
        ("/models/Mixtral-8x7B-Instruct-v0.1", "", ""),
        ("LargeWorldModel/LWM-Text-Chat-1M", "[INST]", "[/INST]"),
        ("lmsys/longchat-7b-v1.5-32k", "A chat between", " USER: ... ASSISTANT:"),
    ],
)
def test_prompts_are_wrapped_as_in_the_paper_s_run(demo, model, before, behind):
    tokenizer = copy.copy(demo.tokenizer)
    tokenizer.name_or_path = model
    prompt = sample().prompt(tokenizer, "longbench", "hidden")
    start, _, end = behind.partition("...")
    assert prompt.text.startswith(before)
    assert prompt.text.endswith(f"{start}Text. Why?{end}" if end else f"Text. Why?{behind}")
    assert prompt.text[prompt.context_characters :].startswith("Why?")
    assert not prompt.has_special_tokens
    bare = sample(chat=False).prompt(tokenizer, "longbench", "visible")
    assert bare.text == "Text. Why?"
