"""`snapkv ask` with drafts: the same text, and what it took."""

import json

import pytest

from snapkv.decoding import MedusaHeads, save_heads

ASK = ("-q", "Where is the key?", "--answer-start", "The key is under the")
SMALL = ("--budget", 48, "--window-size", 16, "--kernel-size", 13, "--max-new-tokens", 6)


@pytest.fixture(scope="module")
def heads(demo, tmp_path_factory):
    """Heads that guess what the model says next for the tokens behind it, too."""
    folder = tmp_path_factory.mktemp("heads")
    save_heads(MedusaHeads.untrained(demo.model, 2), folder, base_model="demo")
    return folder


def ways(heads):
    return {
        "medusa": ("--medusa", heads),
        "assistant": ("--assistant", "demo"),
        "prompt-lookup": ("--prompt-lookup", 3),
        "self-speculate": ("--self-speculate",),
    }


@pytest.mark.parametrize("way", ["medusa", "assistant", "prompt-lookup", "self-speculate"])
def test_drafts_change_what_it_takes_and_not_the_answer(snapkv, demo_only, document, heads, way):
    done = snapkv("ask", document, *ASK, *SMALL, *ways(heads)[way], "--json")
    assert done.status == 0, done.err
    (answer,) = json.loads(done.out)["runs"]
    assert answer["text"] == "The key is under the blue stone."
    drafts = answer["drafts"]
    assert drafts["method"] == way
    assert 1 <= drafts["passes"] <= 5
    assert drafts["acceptance_length"] >= 1
    if way in ("assistant", "prompt-lookup", "self-speculate"):
        assert drafts["acceptance_length"] > 1
    if way == "self-speculate":
        assert drafts["full_cache_bytes"] == answer["cache"]["full_bytes"]
        assert drafts["draft_passes"] > 0


def test_the_table_says_tokens_per_pass(snapkv, demo_only, document, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    done = snapkv("ask", document, *ASK, *SMALL, "--self-speculate")
    assert done.out == "The key is under the blue stone.\n"
    assert "tokens per pass" in done.err
    assert "a full cache of" in done.err
    done = snapkv("ask", document, *ASK, *SMALL, "--prompt-lookup", 3, "--compare")
    (line,) = [line for line in done.out.splitlines() if "tokens per pass" in line]
    assert "(prompt-lookup)" in line
    assert line.split("│")[-2].strip() == "-"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--self-speculate", "--prompt-lookup", 3), "drafts: expected one of"),
        (("--prompt-lookup", 0), "prompt_lookup: expected"),
        (("--medusa", "nowhere"), "medusa: expected 'demo', a folder"),
        (("--self-speculate", "--policy", "tova"), "only compresses the prompt"),
    ],
    ids=["two ways", "no tokens", "no heads", "evicting"],
)
def test_what_cannot_work_is_refused(snapkv, demo_only, document, options, message):
    budget = ("--budget", 48, "--max-new-tokens", 4)
    done = snapkv("ask", document, *ASK, *budget, *options)
    assert (done.status, done.out.strip("\n")) in ((2, ""), (2, "The key is under the"))
    assert message in done.err


def test_training_on_the_command_line(snapkv, demo_only, document, tmp_path, monkeypatch):
    found = {}

    def train(loaded, texts, folder, plan, progress):
        found.update(texts=texts, folder=folder, plan=plan)
        heads = MedusaHeads.untrained(loaded.model, plan.num_heads)
        heads.accuracies = ((0.5, 0.25), (0.25, 0.125))
        return heads

    monkeypatch.setattr("snapkv_lab.training.medusa.train", train)
    out = ("--to", tmp_path / "heads", "--num-heads", 2)
    done = snapkv("medusa", "train", "--document", document, *out)
    assert done.status == 0, done.err
    assert done.out.splitlines()[0] == ("head 1: right 50.0% of the time, 75.0% among its first 2")
    assert found["plan"].num_heads == 2
    assert "blue stone" in found["texts"][0]
    as_json = snapkv("medusa", "train", "--document", document, *out, "--json")
    assert json.loads(as_json.out)["accuracies"] == [[0.5, 0.25], [0.25, 0.125]]
    assert snapkv("medusa", "train", "--document", document, "--epochs", 0).status == 2
    assert snapkv("medusa", "train").status == 2
