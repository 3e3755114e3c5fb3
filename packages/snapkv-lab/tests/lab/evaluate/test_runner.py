"""Runs of samples with all methods: prompts, records and refusals."""

import pytest

from snapkv import H2O, TOVA, AdaKV, KVzip, SnapKV
from snapkv.errors import InvalidArgumentError, UnsupportedModelError
from snapkv.prefill import SharedReading
from snapkv_app.answering import answer
from snapkv_app.prefills import LayerByLayer
from snapkv_app.settings import GenerationSettings
from snapkv_lab.evaluate.asking import Method
from snapkv_lab.evaluate.runner import Run
from snapkv_lab.evaluate.store import record_key
from snapkv_lab.rows import read_rows
from tests.lab.evaluate.tiny import METHODS, Keys, records, untimed

TWICE = Method(label="kvzip@24", policy=KVzip(24, window_size=4, chunk_tokens=64))


def run(tiny, folder, task=None, methods=METHODS[:2], **options):
    return Run(loaded=tiny, task=task or Keys(), methods=methods, **options).evaluate(folder)


def answering(monkeypatch):
    """Record the prompts that are answered."""
    prompts = []

    def recorded(loaded, prompt, *given, **options):
        prompts.append(prompt)
        return answer(loaded, prompt, *given, **options)

    monkeypatch.setattr("snapkv_app.prompt_reader.answer", recorded)
    return prompts


def test_record_equals_the_answer_of_the_application(tiny, tmp_path):
    results = run(tiny, tmp_path)
    found = records(tmp_path)
    assert [(r["sample"], r["method"]) for r in found] == [
        (f"{count}/{number}", label)
        for count in (8, 16)
        for number in (0, 1)
        for label in ("full", "snapkv@64")
    ]
    sample = next(Keys().samples(tiny.tokenizer))
    prompt = sample.prompt(tiny.tokenizer, "tokenizer", "visible")
    given = answer(tiny, prompt, SnapKV(64), GenerationSettings(max_new_tokens=3))
    assert untimed([found[1]]) == [
        {
            "sample": "8/0",
            "method": "snapkv@64",
            "question": "visible",
            "cell": {"sentences": 8},
            "policy": SnapKV(64).describe(),
            "references": ["under the blue stone"],
            "status": "ok",
            "prediction": given.text,
            "score": 0.0,
            "prompt_tokens": given.prompt_tokens,
            "new_tokens": 3,
            "kept_tokens": 64,
            "held_bytes": given.cache.held_bytes,
            "full_bytes": given.cache.full_bytes,
        }
    ]
    assert found[1]["token_ms"] > 0
    assert results.rows == read_rows(tmp_path / "summary.jsonl")


def test_second_run_only_answers_missing_questions(tiny, tmp_path, monkeypatch):
    first = run(tiny, tmp_path)
    prompts = answering(monkeypatch)
    again = run(tiny, tmp_path)
    assert prompts == []
    assert again.rows == first.rows
    more = run(tiny, tmp_path, methods=(METHODS[2], *METHODS[:2]))
    assert len(prompts) == 4
    assert len(records(tmp_path)) == 12
    labels = list(dict.fromkeys(row["method"] for row in more.rows))
    assert labels == ["snapkv@40", "full", "snapkv@64"]  # as asked for, not as answered
    assert [row for row in more.rows if row["method"] != "snapkv@40"] == first.rows


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"task": Keys(sentences=(8, 17))},
            r"another task\.sentences\.?.*\[8, 16\] there, \[8, 17\]",
        ),
        ({"template": "none"}, 'another template: "tokenizer" there, "none" here'),
        ({"limit": 1}, "another limit: null there, 1 here, another samples: 4 there, 2 here"),
        ({"methods": (Method(label="full", policy=SnapKV(64)),)}, "were made by full as"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_run_in_the_folder_is_refused(tiny, tmp_path, change, said):
    run(tiny, tmp_path)
    with pytest.raises(InvalidArgumentError, match=said):
        run(tiny, tmp_path, **change)
    assert len(records(tmp_path)) == 8


def test_prompt_beyond_the_positions_gives_a_cell_without_score(tiny, tmp_path):
    rows = run(tiny, tmp_path, task=Keys(sentences=(8, 100), each=1)).rows
    by_cell = {(row["method"], row["cell"]["sentences"]): row for row in rows}
    for method in ("full", "snapkv@64"):
        assert by_cell[method, 8]["status"] == "ok"
        assert by_cell[method, 100]["status"] == "too long"
        assert by_cell[method, 100]["failed"] == {"too long": 1}
        assert by_cell[method, 100]["score"] is None
    assert [r["status"] for r in records(tmp_path)] == ["ok", "ok", "too long", "too long"]


def test_methods_with_a_shared_reading_answer_as_with_their_own(tiny, tmp_path):
    pieces = Method(label="pieces", policy=SnapKV(40), prefill=LayerByLayer(chunk_tokens=32))
    policies = {"h2o": H2O(40), "tova": TOVA(40), "adakv": AdaKV(SnapKV(40)), "kvzip": TWICE.policy}
    methods = [*METHODS, pieces, *(Method(label=k, policy=p) for k, p in policies.items())]
    given = {"questions": ("hidden",), "reference_loss": True}
    task = Keys(each=1)
    run(tiny, tmp_path / "together", task, methods=methods, **given)
    for method in methods:
        run(tiny, tmp_path / "alone", task, methods=[method], **given)
    together, alone = (
        {record_key(record): record for record in untimed(records(tmp_path / name))}
        for name in ("together", "alone")
    )
    assert len(together) == 2 * len(methods)
    losses = [{place: each.pop("loss") for place, each in own.items()} for own in (together, alone)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert len(set(losses[1].values())) > len(methods)
    assert together == alone


def test_a_prompt_is_read_once_for_all_methods_that_read_exactly(tiny, tmp_path, monkeypatch):
    read = []

    def counted(model, ids):
        read.append(ids.shape)
        return SharedReading(model, ids)

    monkeypatch.setattr("snapkv_app.prompt_reader.SharedReading", counted)
    pieces = Method(label="pieces", policy=SnapKV(40), prefill=LayerByLayer(chunk_tokens=32))
    run(tiny, tmp_path / "three", methods=[*METHODS, pieces])
    assert len(read) == 4
    for methods in (METHODS[:1], [METHODS[0], pieces]):
        run(tiny, tmp_path / f"{len(methods)}", methods=methods)
    assert len(read) == 4


def test_unexpected_error_ends_the_run_and_keeps_its_answers(tiny, tmp_path, monkeypatch):
    given = []

    def third_fails(*arguments, **options):
        given.append(arguments)
        if len(given) == 3:
            raise RuntimeError("broken")
        return answer(*arguments, **options)

    monkeypatch.setattr("snapkv_app.prompt_reader.answer", third_fails)
    with pytest.raises(RuntimeError, match="broken"):
        run(tiny, tmp_path)
    assert len(records(tmp_path)) == 2
    assert not (tmp_path / "summary.jsonl").exists()
    assert len(run(tiny, tmp_path).rows) == 4
    assert len(records(tmp_path)) == 8


@pytest.mark.parametrize(
    "error",
    [UnsupportedModelError("no"), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
)
def test_methods_read_separately_if_a_reading_cannot_be_shared(tiny, tmp_path, monkeypatch, error):
    def refused(model, ids):
        raise error

    whole = run(tiny, tmp_path / "whole")
    monkeypatch.setattr("snapkv_app.prompt_reader.SharedReading", refused)
    alone = run(tiny, tmp_path / "alone")
    assert untimed(alone.rows) == untimed(whole.rows)
    assert {row["status"] for row in alone.rows} == {"ok"}
