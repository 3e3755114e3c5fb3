"""Studies of documents and answers: measurements, files and refusals."""

import json
from dataclasses import replace

import pytest
import torch

from snapkv import ops
from snapkv.errors import InvalidArgumentError
from snapkv_app.models import LoadedModel
from snapkv_app.observing import observed
from snapkv_lab import drawing
from snapkv_lab.study import HitRate, Instructions, Overlap, Position, Sensitivity
from snapkv_lab.study.base import format_weighted_mean, mean_rows
from snapkv_lab.study.material import load_long_texts
from tests.families import random_ids, tiny_model
from tests.lab.evaluate.tiny import tiny_loaded

SMALL = {"samples": 1, "document_tokens": 200}
READING = {
    "hit-rate": HitRate(**SMALL, generation_windows=2, generation_tokens=3),
    "overlap": Overlap(**SMALL, window_tokens=8, prompt_windows=3, generation_windows=1),
    "instructions": Instructions(**SMALL, questions=("Who?", "What happens?"), answer_length=3),
    "position": Position(**SMALL, generation_windows=1, generation_tokens=3),
}


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "cohere2"])
def test_observed_attention_equals_the_models_own(family):
    model, ids = tiny_model(family, "eager"), random_ids(1, 60)
    loaded = LoadedModel(model=model, tokenizer=None, name=family, revision=None)
    seen = observed(loaded, ids, 20, ops.attention_weights)
    with torch.inference_mode():
        attentions = model(ids, output_attentions=True).attentions
    assert seen
    for layer_idx, weights in seen.items():
        torch.testing.assert_close(weights, attentions[layer_idx][:, :, -20:], atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def findings(demo, tiny, tmp_path_factory):
    """The results of small runs of all studies, by name."""
    found = {
        name: study.measure(tiny, tmp_path_factory.mktemp(name)) for name, study in READING.items()
    }
    new = tmp_path_factory.mktemp
    sensitivity = Sensitivity(length=300, depths=1, windows=(16,), kernels=(1, 5), budget=48)
    found["sensitivity"] = sensitivity.measure(demo, new("sensitivity"))
    return found


@pytest.mark.parametrize("name", [*READING, "sensitivity"])
def test_a_study_has_a_table_a_figure_and_a_folder(name, findings, tmp_path):
    found = findings[name]
    study = READING.get(name) or Sensitivity(windows=(16,), kernels=(1, 5))
    table = study.table(found.rows)
    assert table.rows
    assert all(len(line) == len(table.headings) for line in table.rows)
    path = tmp_path / "figure.svg"
    drawing.save_figure(study.figure(found.rows), path, drawing.PLAIN)
    assert path.read_text().count("<path") > 10
    run = json.loads((found.folder / "run.json").read_text())
    assert {"torch", "transformers", "snapkv", "python", "data", "model"} <= run.keys()
    summary = (found.folder / "summary.jsonl").read_text().splitlines()
    if name in READING:
        assert run["study"]["name"] == name
        assert list(map(json.loads, summary)) == found.rows


def test_hit_rate_has_a_row_for_every_selection_window_and_layer(findings):
    found = findings["hit-rate"]
    places = {(row["selection"], row["window"], row["layer"]) for row in found.rows}
    assert len(places) == len(found.rows) == 2 * 2 * 2
    rates = [row["hit_rate"] for row in found.rows if row["hit_rate"] is not None]
    assert all(0 <= rate <= 1 for rate in rates)
    (record,) = map(json.loads, (found.folder / "samples.jsonl").read_text().splitlines())
    (reading,) = record["readings"]
    assert reading["answer_tokens"] == 6
    assert reading["prompt_tokens"] > 200


def test_stopped_study_continues_and_another_is_refused(findings, tiny, monkeypatch):
    monkeypatch.setattr("snapkv_lab.study.attention.read_sample", None)  # nothing is read again
    found, study = findings["hit-rate"], READING["hit-rate"]
    assert study.measure(tiny, found.folder).rows == found.rows
    with pytest.raises(InvalidArgumentError, match="results of another run"):
        replace(study, threshold=0.1).measure(tiny, found.folder)


def test_rows_of_instructions_name_the_compared_questions(findings):
    rows = {name: found.rows for name, found in findings.items()}
    windows = {(row["of"], row["window"]) for row in rows["overlap"]}
    assert windows == {("prompt", -3), ("prompt", -2), ("prompt", -1), ("answer", 1)}
    for row in rows["instructions"]:
        assert (row["overlap"] == 1) == (row["compared"] == "one question")
    assert {row["questions"] for row in rows["instructions"]} == {"1 and 1", "1 and 2", "2 and 2"}
    assert {row["question"] for row in rows["position"]} == {"first", "last"}


def test_position_study_puts_the_question_before_the_document(demo):
    parts = Position(**SMALL).steps([("text", "Long ago.")])
    texts = {
        part.variant: part.samples[0].prompt(demo.tokenizer, "tokenizer", "visible").text
        for part in parts
    }
    question = Position().questions[0]
    assert texts["last"].index("Long ago.") < texts["last"].index(question)
    assert texts["first"].index(question) < texts["first"].index("Long ago.")


def test_sensitivity_has_a_row_for_every_setting_and_the_full_cache(findings):
    rows = findings["sensitivity"].rows
    settings = ["window 16, no pooling", "window 16, max 5", "window 16, avg 5"]
    assert [row["method"] for row in rows] == ["full cache", *settings]
    assert rows[0]["score"] == 1.0  # the full cache finds the number
    table = Sensitivity().table(rows)
    assert table.headings == ("window", "pooling", "kernel 1", "kernel 5")


def test_findings_report_a_summary_that_cannot_be_written(tiny, tmp_path):
    (tmp_path / "summary.jsonl").mkdir()
    given = {"windows": (16,), "kernels": (1,), "budget": 64, "length": 400, "depths": 1}
    assert Sensitivity(**given).measure(tiny, tmp_path).unwritten is not None


def test_means_skip_none_and_weight_layers():
    rows = [{"layer": 1, "x": 0.5}, {"layer": 1, "x": None}, {"layer": 2, "x": None}]
    means = [{"layer": 1, "x": 0.5}, {"layer": 2, "x": None}]
    assert mean_rows(rows, ("layer",), ("x",)) == means
    rows = [{"rate": 1.0, "of": 3}, {"rate": 0.0, "of": 1}, {"rate": None, "of": 0}]
    assert format_weighted_mean(rows, "rate", "of") == "0.75"
    assert format_weighted_mean(rows[2:], "rate", "of") == "-"


def documents_of(tmp_path, *lengths):
    files = []
    for number, words in enumerate(lengths):
        files.append(tmp_path / f"{number}.txt")
        files[-1].write_text("word " * words)
    return tuple(map(str, files))


def fitted(study, loaded):
    return study._fit_documents(loaded, load_long_texts(study.documents, count=study.samples)[0])


@pytest.mark.parametrize("name", ["position", "instructions"])
def test_documents_shorter_than_requested_are_read_completely(demo, tmp_path, name):
    files = documents_of(tmp_path, 900, 400, 5000)
    study, parts, (notice,) = fitted(
        replace(READING[name], documents=files, document_tokens=3072), demo
    )
    assert study.document_tokens == 401  # the space at the end is one
    contexts = {sample.context.count("word") for part in parts for sample in part.samples}
    assert contexts <= {400, 401}
    assert "are cut to 401 tokens instead of 3,072" in notice
    assert "1.txt has no more" in notice


@pytest.mark.parametrize(("name", "positions"), [("position", 400), ("instructions", 700)])
def test_documents_are_cut_to_the_models_positions(demo, tmp_path, name, positions):
    loaded = tiny_loaded(demo.tokenizer, positions=positions)
    files = documents_of(tmp_path, 3000, 2000)
    study, parts, notices = fitted(
        replace(READING[name], documents=files, document_tokens=3072), loaded
    )
    prompts = [
        s.prompt(demo.tokenizer, study.template, "visible").token_ids(demo.tokenizer).shape[1]
        for part in parts
        for s in part.samples
    ]
    assert positions - 8 < max(prompts) + study.answer_tokens <= positions
    assert f"the model has {positions} positions for prompt and answer" in notices[0]
    assert f"cut to {study.document_tokens} tokens" in notices[0]


def test_shortened_study_has_a_notice_and_can_continue(tiny, tmp_path):
    study = replace(READING["hit-rate"], documents=documents_of(tmp_path, 190))
    first = study.measure(tiny, tmp_path / "out")
    assert first.notices == tuple(first.run["notices"])
    assert first.run["document_tokens_read"] == 191
    assert study.measure(tiny, tmp_path / "out").rows == first.rows
    whole = replace(study, document_tokens=150).measure(tiny, tmp_path / "whole")
    assert whole.notices == ()
    assert "notices" not in whole.run
