"""LongBench is asked and scored as published: prompts, rows, the cut, settings, and one command.

A tiny random model reads the demo's tokens.
"""

import copy
import hashlib
import json
import zipfile

import pytest

from snapkv.errors import DocumentError, MissingDependencyError
from snapkv_lab.evaluate.tasks import LongBench
from snapkv_lab.evaluate.tasks.longbench import (
    HUB,
    SETS,
    cut_middle,
    max_prompt_tokens,
    prompt_format,
    read_rows,
)

MISTRAL = "mistralai/Mistral-7B-Instruct-v0.2"
TEXT = "The gate opens at nine. The key is under the blue stone. A cat sleeps on the wall. "

INPUTS = {
    "trec": "Question: When does the gate open ?\nType:",
    "samsum": "Dialogue: Ann: Where is the key?\nBen: Under the stone.\nSummary: ",
    "lcc": "",
    "passage_count": "",
    "gov_report": "",
    "multi_news": "",
    "repobench-p": "def key(place):\n    if place:\n        ",
    "passage_retrieval_en": "An abstract about a gate that opens at nine and a cat on a wall.",
}


def row(name, **changed):
    """Return a row in the published schema."""
    answers = {"passage_retrieval_en": ["Paragraph 3"], "passage_count": ["3"], "trec": ["Date"]}
    return {
        "input": INPUTS.get(name, "Where is the key?"),
        "context": TEXT * 3,
        "answers": answers.get(name, ["under the blue stone", "the stone"]),
        "length": 48,
        "dataset": name,
        "language": "en",
        "all_classes": ["Date", "Food", "Place"] if name == "trec" else None,
        "_id": f"id-{name}",
    } | changed


def write(folder, name, *rows):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))


@pytest.fixture
def data(tmp_path):
    """A folder with two rows of every set."""
    for name in SETS:
        write(tmp_path / "data", name, row(name), row(name, context=TEXT * 30))
    return tmp_path / "data"


def samples(tokenizer, **settings):
    return list(LongBench(**settings).samples(tokenizer))


# Prompts


def test_longbench_prompts_have_the_published_hashes():
    for data_set in SETS.values():
        text = "{context}".join(prompt_format(data_set))
        assert hashlib.sha256(text.encode()).hexdigest().startswith(data_set.prompt_sha256)


def test_longbench_refuses_a_prompt_that_was_not_published(monkeypatch, tmp_path):
    changed = tmp_path / "trec.yaml"
    changed.write_text(
        'doc_to_text: "Which type?\\n{{context}}\\n{{question}}"\nf: !function a.b\n'
    )
    monkeypatch.setattr("snapkv_lab.evaluate.tasks.longbench.package_file", lambda *_: changed)
    with pytest.raises(MissingDependencyError, match=r"prompt of trec .* --no-deps lm-eval=="):
        prompt_format(SETS["trec"])


def test_braces_in_a_document_are_not_replaced(demo, tmp_path):
    write(tmp_path, "trec", row("trec", context="f{input}", input="{context}{0}"))
    (one,) = samples(demo.tokenizer, data=str(tmp_path), datasets=("trec",))
    assert one.context.endswith("f{input}")
    assert one.question == "\n{context}{0}"


# Sets


def test_context_and_question_of_a_sample_join_to_the_published_prompt(demo, data):
    found = samples(demo.tokenizer, data=str(data))
    assert [one.name for one in found] == [f"{name}/{n}" for name in SETS for n in (1, 2)]
    for one in found:
        name = one.cell["dataset"]
        before, behind = prompt_format(SETS[name])
        assert one.context.startswith(before)
        assert one.context.endswith(TEXT)
        assert one.question == behind.replace("{input}", INPUTS.get(name, "Where is the key?"))
        hidden = one.prompt(demo.tokenizer, "none", "hidden")
        assert hidden.text == one.context + one.question
        assert hidden.text[hidden.context_characters :].strip() == one.question.strip()
        chat = one.prompt(demo.tokenizer, "tokenizer", "visible").text
        assert chat.startswith("<|im_start|>") == SETS[name].chat


def test_a_dialogue_is_summarised_on_one_line_that_is_not_empty(demo, data):
    one = samples(demo.tokenizer, data=str(data), datasets=("samsum",))[0]
    assert one.settings.min_new_tokens == 1
    assert [demo.tokenizer.decode(token) for token in one.settings.stop_token_ids] == ["\n"]


@pytest.mark.parametrize(
    ("name", "prediction", "score"),
    [
        ("qasper", "Under the blue stone\nand more", 2 * 3 / 8),
        ("triviaqa", "\nUnder the blue stone\nand more", 1.0),
        ("trec", "Date or Food", 0.5),
        ("samsum", "under the blue stone\nBen", 1.0),
        ("passage_retrieval_en", "Paragraph 3", 1.0),
        ("lcc", "under the blue stone\n}", 1.0),
    ],
)
def test_each_set_uses_its_published_metric(demo, data, name, prediction, score):
    """The F1 of qasper: the answer has 5 words, and all 3 right words are among them."""
    task = LongBench(data=str(data), datasets=(name,))
    sample = next(iter(task.samples(demo.tokenizer)))
    assert task.score(sample, prediction) == pytest.approx(score, abs=1e-6)


# The cut through the middle


def published_cut(tokenizer, prompt, max_length):
    """Cut a prompt as LongBench does it."""
    ids = tokenizer(prompt, truncation=False).input_ids
    if len(ids) <= max_length:
        return prompt
    half = int(max_length / 2)
    first = tokenizer.decode(ids[:half], skip_special_tokens=True)
    return first + tokenizer.decode(ids[-half:], skip_special_tokens=True)


@pytest.mark.parametrize("length", [64, 101])
def test_a_long_prompt_loses_its_middle_as_published(demo, data, length):
    whole = samples(demo.tokenizer, data=str(data))
    cut = samples(demo.tokenizer, data=str(data), max_prompt_tokens=length)
    for before, after in zip(whole, cut, strict=True):
        text = published_cut(demo.tokenizer, before.context + before.question, length)
        assert after.context + after.question == text
        fits = len(demo.tokenizer(before.question).input_ids) < length // 2
        if fits:
            assert after.question.strip() == before.question.strip()
        else:
            assert before.question.endswith(after.question)


class Normalising:
    """A tokenizer of words that writes out ligatures, drops spaces and adds special tokens."""

    def __call__(self, text, **_):
        return {"input_ids": ["<s>", *text.replace("ﬁ", "fi").split()]}

    def decode(self, ids, skip_special_tokens):
        return " ".join(word for word in ids if not (skip_special_tokens and word == "<s>"))


def test_question_is_found_in_text_that_another_tokenizer_decoded():
    context, question = cut_middle(Normalising(), "a " * 50, "\n\nNow, ﬁnd  the\n\nfi.", 20)
    assert question == "Now, find the fi."
    assert context == "a " * 8 + "aa " + "a " * 5


@pytest.mark.parametrize(
    ("model", "positions", "tokens"),
    [
        (MISTRAL, 32_768, 31_500),
        ("demo", 8_192, 8_192 - 512 - 256),
        ("demo", 512, 256),
        ("demo", None, None),
    ],
)
def test_prompts_are_cut_to_the_published_length_or_the_models_positions(model, positions, tokens):
    assert max_prompt_tokens(model, positions) == tokens
    assert LongBench().for_model(model, positions).max_prompt_tokens == tokens
    assert LongBench(max_prompt_tokens=99).for_model(model, positions).max_prompt_tokens == 99


# Rows


def test_rows_are_read_from_the_archive_and_from_folders(data, tmp_path):
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("__MACOSX/data/._trec.jsonl", "no rows")
        archive.writestr("__MACOSX/data/trec.jsonl", "no rows")
        archive.write(data / "trec.jsonl", "data/trec.jsonl")
    zipped = read_rows(tmp_path / "data.zip", SETS["trec"], extended=False)
    assert zipped == read_rows(tmp_path, SETS["trec"], extended=False)
    assert zipped[0]["all_classes"] == ["Date", "Food", "Place"]
    assert zipped[0]["answers"] == ["Date"]


def test_download_error_names_the_command_that_fetches_the_data(demo, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DocumentError) as failure:
        samples(demo.tokenizer)
    assert HUB in str(failure.value)
    assert "hf download zai-org/LongBench data.zip --repo-type dataset" in str(failure.value)
    assert "\n" not in str(failure.value)


def test_the_extended_sets_come_from_their_own_files_by_length(demo, tmp_path):
    lengths = (3999, 4000, 7999, 8000)
    write(tmp_path, "lcc_e", *(row("lcc", length=length) for length in lengths))
    task = LongBench(data=str(tmp_path), datasets=("lcc",), extended=True)
    found = [one.cell for one in task.samples(demo.tokenizer)]
    assert [cell["length"] for cell in found] == ["0-4k", "4-8k", "4-8k", "8k+"]
    assert task.axes == ("dataset", "length")
    assert LongBench().axes == ("dataset",)


# What the paper says


def test_published_scores_are_returned_for_the_papers_models():
    published = LongBench().published(MISTRAL)
    assert list(published) == ["full", "snapkv@1024", "snapkv@2048", "snapkv@4096", "h2o@4096"]
    means = {name: sum(row.values()) / 16 for name, row in published.items()}
    assert means == pytest.approx(
        {
            "full": 0.4256,
            "snapkv@1024": 0.4145,
            "snapkv@2048": 0.4199,
            "snapkv@4096": 0.4238,
            "h2o@4096": 0.4045,
        },
        abs=5e-5 + 1e-12,  # two sums lie at the edge, and differ in their last bit between Pythons
    )
    assert published["full"]["narrativeqa"] == pytest.approx(0.2682)
    assert published["h2o@4096"]["repobench-p"] == pytest.approx(0.511)


@pytest.mark.parametrize(
    ("model", "before", "behind"),
    [
        (MISTRAL, "", ""),
        ("/models/Mixtral-8x7B-Instruct-v0.1", "", ""),
        ("LargeWorldModel/LWM-Text-Chat-1M", "[INST]", "[/INST]"),
        ("lmsys/longchat-7b-v1.5-32k", " USER: ", " ASSISTANT:"),
    ],
)
def test_prompts_are_wrapped_as_in_the_paper_s_run(demo, data, model, before, behind):
    tokenizer = copy.copy(demo.tokenizer)
    tokenizer.name_or_path = model
    chat, _, bare, _ = samples(tokenizer, data=str(data), datasets=("qasper", "trec"))
    prompt = chat.prompt(tokenizer, "longbench", "hidden")
    assert prompt.text.endswith(f"{before}{chat.context}{chat.question}{behind}")
    assert prompt.text.startswith("A chat between" if "longchat" in model else before)
    assert prompt.text[prompt.context_characters :].startswith(chat.question.strip())
    assert not prompt.has_special_tokens
    text = bare.prompt(tokenizer, "longbench", "visible").text
    assert text == bare.context + bare.question
