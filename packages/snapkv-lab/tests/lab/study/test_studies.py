"""Studies on real models and text: what is looked at, what is written, what is refused."""

import json
from dataclasses import replace

import pytest
import torch

from snapkv import ops
from snapkv.app.models import LoadedModel
from snapkv.app.observing import observed
from snapkv.errors import InvalidArgumentError, MissingDependencyError
from snapkv_lab import drawing
from snapkv_lab.study import HitRate, Instructions, Overlap, Position, Sensitivity, figures
from snapkv_lab.study.base import mean_rows, weighted
from snapkv_lab.study.material import long_texts
from tests.families import random_ids, tiny_model


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "cohere2"])
def test_what_is_observed_is_the_models_own_attention(family):
    model, ids = tiny_model(family, "eager"), random_ids(1, 60)
    loaded = LoadedModel(model=model, tokenizer=None, name=family, revision=None)
    seen = observed(
        loaded,
        ids,
        20,
        lambda layer: ops.attention_weights(layer.queries, layer.keys, layer.score_options),
    ).seen
    with torch.inference_mode():
        attentions = model(ids, output_attentions=True).attentions
    assert seen
    for layer_idx, weights in seen.items():
        torch.testing.assert_close(weights, attentions[layer_idx][:, :, -20:], atol=1e-5, rtol=0)


SMALL = {"samples": 1, "document_tokens": 200}

HIT_RATE = HitRate(**SMALL, generation_windows=2, generation_tokens=3)


@pytest.fixture(scope="module")
def found(demo, tmp_path_factory):
    """What `hit-rate` gives of one short document."""
    return HIT_RATE.into(demo, tmp_path_factory.mktemp("hit-rate"))


def test_hit_rate_has_a_row_for_every_selection_window_and_layer(found):
    places = {(row["selection"], row["window"], row["layer"]) for row in found.rows}
    assert len(places) == len(found.rows) == 2 * 2 * 30
    rates = [row["hit_rate"] for row in found.rows if row["hit_rate"] is not None]
    assert len(set(rates)) > 1
    assert all(0 <= rate <= 1 for rate in rates)


def test_the_folder_says_how_it_was_made_and_what_was_answered(found, demo):
    run = json.loads((found.folder / "run.json").read_text())
    assert run["study"]["keep_ratio"] == 0.05
    assert run["model"] == demo.description()
    assert {"torch", "transformers", "snapkv", "python", "data"} <= run.keys()
    (record,) = map(json.loads, (found.folder / "samples.jsonl").read_text().splitlines())
    (reading,) = record["readings"]
    assert reading["answer_tokens"] == 6
    assert reading["prompt_tokens"] > 200
    summary = (found.folder / "summary.jsonl").read_text().splitlines()
    assert list(map(json.loads, summary)) == found.rows


def test_a_study_goes_on_where_it_was_stopped(found, demo, monkeypatch):
    def fail(*arguments):
        raise AssertionError("read again")

    monkeypatch.setattr("snapkv_lab.study.reading.read", fail)
    assert HIT_RATE.into(demo, found.folder).rows == found.rows


def test_a_folder_of_another_study_is_left_alone(found, demo):
    other = HitRate(**SMALL, generation_windows=2, generation_tokens=3, threshold=0.1)
    with pytest.raises(InvalidArgumentError, match="results of the same run"):
        other.into(demo, found.folder)


@pytest.fixture(scope="module")
def rows(demo, tmp_path_factory):
    """The rows of small runs of all other studies, by name."""
    studies = (
        Overlap(**SMALL, window_tokens=8, prompt_windows=3, generation_windows=1),
        Instructions(**SMALL, questions=("Who?", "What happens?"), answer_length=3),
        Position(**SMALL, generation_windows=1, generation_tokens=3),
        Sensitivity(length=300, depths=1, windows=(16,), kernels=(1, 5), budget=48),
    )
    return {s.name: (s, s.into(demo, tmp_path_factory.mktemp(s.name)).rows) for s in studies}


def test_overlap_counts_windows_from_the_prompts_end(rows):
    windows = {(row["of"], row["window"]) for row in rows["overlap"][1]}
    assert windows == {("prompt", -3), ("prompt", -2), ("prompt", -1), ("answer", 1)}


def test_a_question_has_all_positions_in_common_with_itself(rows):
    for row in rows["instructions"][1]:
        assert (row["overlap"] == 1) == (row["compared"] == "one question")
    assert {row["questions"] for row in rows["instructions"][1]} == {
        "1 and 1",
        "1 and 2",
        "2 and 2",
    }


def test_position_asks_before_and_behind_the_document(rows):
    assert {row["question"] for row in rows["position"][1]} == {"first", "last"}


def test_the_question_comes_first_and_the_document_last(demo):
    parts = Position(**SMALL).parts([("text", "Long ago.")])
    texts = {
        part.variant: part.samples[0].prompt(demo.tokenizer, "tokenizer", "visible").text
        for part in parts
    }
    question = Position().questions[0]
    assert texts["last"].index("Long ago.") < texts["last"].index(question)
    assert texts["first"].index(question) < texts["first"].index("Long ago.")


def test_sensitivity_has_a_row_for_every_setting_and_the_full_cache(rows):
    study, found = rows["sensitivity"]
    methods = [row["method"] for row in found]
    assert methods == [
        "full cache",
        "window 16, no pooling",
        "window 16, max 5",
        "window 16, avg 5",
    ]
    assert found[0]["score"] == 1.0  # the full cache finds the number
    assert study.table(found).header == ("window", "pooling", "kernel 1", "kernel 5")


def test_a_summary_of_sensitivity_that_cannot_be_written_is_said(demo, tmp_path):
    (tmp_path / "summary.jsonl").mkdir()
    given = {"windows": (16,), "kernels": (1,), "budget": 64, "length": 400, "depths": 1}
    assert Sensitivity(**given).into(demo, tmp_path).unwritten is not None


@pytest.mark.parametrize("name", ["hit-rate", "overlap", "instructions", "position", "sensitivity"])
def test_every_study_has_a_table_and_a_figure(name, rows, found, tmp_path):
    study, own = (HIT_RATE, found.rows) if name == "hit-rate" else rows[name]
    table = study.table(own)
    assert table.lines
    assert all(len(line) == len(table.header) for line in table.lines)
    path = tmp_path / "figure.svg"
    figures.save(study.figure(own), str(path))
    assert path.read_text().count("<path") > 10


def test_means_leave_out_what_is_not_known():
    rows = [{"layer": 1, "x": 0.5}, {"layer": 1, "x": None}, {"layer": 2, "x": None}]
    means = [{"layer": 1, "x": 0.5}, {"layer": 2, "x": None}]
    assert mean_rows(rows, ("layer",), ("x",)) == means


def test_a_weighted_mean_counts_a_layer_by_its_weight():
    rows = [{"rate": 1.0, "of": 3}, {"rate": 0.0, "of": 1}, {"rate": None, "of": 0}]
    assert weighted(rows, "rate", "of") == "0.75"
    assert weighted(rows[2:], "rate", "of") == "-"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HitRate(samples=0), "samples: expected at least 1"),
        (lambda: HitRate(questions=("",)), "question: expected at least one"),
        (lambda: HitRate(threshold=1.0), "threshold: expected attention between 0 and 1"),
        (lambda: HitRate(keep_ratio=0.0), "keep_ratio: expected"),
        (lambda: HitRate(keep_ratio=0.001), "keep_ratio: expected to keep more than sink_tokens=4"),
        (lambda: HitRate(kernel_size=4), "kernel_size: expected an odd number"),
        (lambda: HitRate(generation_tokens=0), "generation_tokens: expected at least 1"),
        (lambda: Overlap(document_tokens=2560), "keep_ratio: expected a part of the 0 positions"),
        (lambda: Instructions(questions=("Why?",)), "question: expected at least two"),
        (lambda: Instructions(keep_ratio=1.5), "keep_ratio: expected a part of 3,072"),
        (lambda: Sensitivity(windows=()), "windows: expected at least 1"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_read(make, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def test_a_document_too_short_is_named(demo, tmp_path):
    note = tmp_path / "note.txt"
    note.write_text("Too short.")
    study = HitRate(documents=(str(note),))
    with pytest.raises(InvalidArgumentError, match=r"at least document_tokens=3,072 .*note\.txt"):
        study.into(demo, tmp_path / "out")


def documents_of(tmp_path, *lengths):
    files = []
    for number, words in enumerate(lengths):
        files.append(tmp_path / f"{number}.txt")
        files[-1].write_text("word " * words)
    return tuple(map(str, files))


READING = {
    "hit-rate": HitRate(generation_windows=2, generation_tokens=3),
    "position": Position(generation_windows=1, generation_tokens=3),
    "instructions": Instructions(answer_length=3),
    "overlap": Overlap(prompt_windows=2, window_tokens=20, generation_windows=2),
}


@pytest.mark.parametrize("name", READING)
def test_documents_that_are_shorter_than_asked_for_are_read_as_they_are(demo, tmp_path, name):
    files = documents_of(tmp_path, 900, 400, 5000)
    study = replace(READING[name], documents=files)
    fitted, parts, notices = study._fitted(
        demo, long_texts(study.documents, count=study.samples)[0]
    )
    assert fitted.document_tokens == 401  # the space at the end is one
    contexts = {sample.context.count("word") for part in parts for sample in part.samples}
    assert contexts <= {400, 401}
    (notice,) = notices
    assert "are cut to 401 tokens instead of 3,072" in notice
    assert "1.txt has no more" in notice


@pytest.mark.parametrize("name", READING)
@pytest.mark.parametrize("positions", [400, 700])
def test_documents_are_cut_to_what_the_model_has_positions_for(
    demo, tmp_path, monkeypatch, name, positions
):
    monkeypatch.setattr(demo.model.config, "max_position_embeddings", positions)
    study = replace(READING[name], documents=documents_of(tmp_path, 3000, 2000))
    fitted, parts, notices = study._fitted(
        demo, long_texts(study.documents, count=study.samples)[0]
    )
    prompts = [
        s.prompt(demo.tokenizer, study.template, "visible").token_ids(demo.tokenizer).shape[1]
        for part in parts
        for s in part.samples
    ]
    assert positions - 8 < max(prompts) + study.answer_tokens <= positions
    assert f"the model has {positions} positions for prompt and answer" in notices[0]
    assert f"cut to {fitted.document_tokens} tokens" in notices[0]


def test_a_shortened_study_says_so_and_is_continued(demo, tmp_path):
    study = replace(READING["hit-rate"], documents=documents_of(tmp_path, 200))
    first = study.into(demo, tmp_path / "out")
    assert first.notices == tuple(first.run["notices"])
    assert first.run["document_tokens_read"] == 201
    assert study.into(demo, tmp_path / "out").rows == first.rows
    whole = replace(study, document_tokens=150).into(demo, tmp_path / "whole")
    assert whole.notices == ()
    assert "notices" not in whole.run


def test_a_study_that_has_nothing_left_to_look_at_is_refused(demo, tmp_path):
    study = Overlap(documents=documents_of(tmp_path, 600))
    with pytest.raises(
        InvalidArgumentError, match="keep_ratio: expected a part of the 0 positions"
    ):
        study.into(demo, tmp_path / "out")


def test_a_figure_of_another_kind_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"ends in \.png"):
        drawing.require_drawable("a.jpeg")


def test_without_matplotlib_the_command_that_brings_it_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'matplotlib"):
        drawing.require_drawable("a.svg")
