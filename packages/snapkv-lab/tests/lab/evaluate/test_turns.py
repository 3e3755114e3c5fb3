"""Several questions in one cache: the samples, the kept tokens, and stopped runs."""

from dataclasses import replace

import pytest

from snapkv import FullCache, KVzip, SnapKV, default_policy
from snapkv.errors import OutOfMemoryError
from snapkv_lab.evaluate import asking
from snapkv_lab.evaluate.asking import LATER, Method
from snapkv_lab.evaluate.runner import Run
from snapkv_lab.evaluate.sample import Conversation
from snapkv_lab.evaluate.tasks import Turns
from tests.lab.evaluate.tiny import records, tiny_loaded, untimed

SMALL = {"lengths": (200,), "questions": 3, "samples_each": 2}


def run_of(loaded, methods, **given):
    settings = {"task": Turns(cloze=True, **SMALL), "template": "none"} | given
    return Run(loaded=loaded, methods=methods, **settings)


@pytest.mark.parametrize("cloze", [False, True], ids=["free", "cloze"])
def test_each_question_of_a_conversation_asks_for_another_line(demo, cloze):
    questions = 3
    task = Turns(cloze=cloze, **SMALL)
    samples = list(task.samples(demo.tokenizer))
    assert samples == list(task.samples(demo.tokenizer))
    assert len({sample.context for sample in samples}) == 2
    for sample in samples:
        assert isinstance(sample, Conversation)
        numbers = dict(line.split(": ") for line in sample.context.splitlines()[2:])
        assert [turn.cell["turn"] for turn in sample.turns] == [*range(1, questions + 1)]
        assert len({turn.references for turn in sample.turns}) == questions
        for turn in sample.turns:
            asked = turn.answer_start if cloze else turn.plain_question
            (name,) = (name for name in numbers if name in asked)
            assert turn.references == (numbers[name],)
            assert task.score(turn, f" {numbers[name]}\n99") == 1
            assert task.score(turn, f"1{numbers[name]} {numbers[name]}") == 0
            assert task.score(turn, "none") == 0
        assert [turn.context for turn in sample.turns[1:]] == [""] * (questions - 1)
        ids = sample.prompt(demo.tokenizer, "tokenizer", "visible").token_ids(demo.tokenizer)
        assert 150 < ids.shape[1] + sample.settings.max_new_tokens <= 200


def test_question_of_every_turn_votes(tiny):
    sample = next(Turns(**SMALL).samples(tiny.tokenizer))
    policy = default_policy(64).policy
    method = Method(label="default", policy=policy, later="recall")
    answers = asking.converse(tiny, sample, method, "tokenizer", "visible")
    prompts = [sample.later_turn(tiny.tokenizer, "tokenizer") for sample in sample.turns]
    for found, prompt in zip(answers, prompts, strict=True):
        voters = max(16, prompt.question_tokens(tiny.tokenizer))
        assert found.policy == replace(policy, voters=voters).describe()


def test_append_compress_and_recall_keep_the_documented_tokens(tiny, tmp_path, monkeypatch):
    real, places = asking.answer_ids, []

    def answer_ids(loaded, ids, cache, *args, **options):
        given = real(loaded, ids, cache, *args, **options)
        places.append([set(head) for head in cache.kept_positions(0)[0].tolist()])
        return given

    monkeypatch.setattr(asking, "answer_ids", answer_ids)
    methods = [Method(label=way, policy=SnapKV(48), later=way) for way in LATER]
    methods += [Method(label="full", policy=FullCache())]
    results = run_of(tiny, methods, questions=("hidden",)).evaluate(tmp_path / "out")
    kept = {(row["method"], row["cell"]["turn"]): row["kept_tokens"] for row in results.rows}
    for turn in (2, 3):
        assert kept["append", turn] - kept["append", turn - 1] > 8
        for way in ("compress", "recall"):
            assert 48 <= kept[way, turn] <= 48 + 8
    for at, way in enumerate(LATER):  # what a later turn keeps of what the first one dropped
        first, *later = places[3 * at : 3 * at + 3]
        end = max(first[0]) - 8  # before the first answer, of which later turns read the last token
        dropped = [set(range(end)) - own for own in first]
        back = [own & gone for turn in later for own, gone in zip(turn, dropped, strict=True)]
        assert any(back) == (way == "recall")
    described = {row["method"]: row["policy"].get("turns") for row in results.rows}
    assert described["append"] is described["full"] is None
    assert (described["compress"], described["recall"]) == ("compress", "recall")
    said = {name: [] for name in (*LATER, "full")}
    for record in records(tmp_path / "out"):
        said[record["method"]].append(record["prediction"])
        assert record["conversation"] in ("200/0/1", "200/1/1")
    assert len(said["full"]) == 6
    assert said["recall"] != said["full"]


def test_second_reading_of_a_text_is_made_once_before_all_questions(tiny, tmp_path):
    policy = KVzip(48)
    methods = [Method(label="kvzip", policy=policy)]
    results = run_of(tiny, methods, questions=("hidden",)).evaluate(tmp_path / "out")
    assert [row["status"] for row in results.rows] == ["ok"] * 3
    kept = [row["kept_tokens"] for row in results.rows]
    seen = [row["prompt_tokens"] for row in results.rows]
    for turn in (1, 2):
        assert kept[turn] - kept[turn - 1] == pytest.approx(seen[turn] - seen[turn - 1], abs=8)


def test_run_stopped_between_turns_continues_with_the_same_answers(tiny, tmp_path):
    methods = [Method(label="recall", policy=SnapKV(48), later="recall")]
    whole = run_of(tiny, methods).evaluate(tmp_path / "whole")
    run_of(tiny, methods).evaluate(tmp_path / "cut")
    written = (tmp_path / "cut" / "samples.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "cut" / "samples.jsonl").write_text("".join(written[:4]) + written[4][:20])
    again = run_of(tiny, methods).evaluate(tmp_path / "cut")
    assert untimed(records(tmp_path / "cut")) == untimed(records(tmp_path / "whole"))
    assert untimed(again.rows) == untimed(whole.rows)
    assert len(written) == 6


def test_questions_after_an_interruption_record_its_reason(tiny, tmp_path, monkeypatch):
    real, calls = asking.answer_ids, []

    def answer_ids(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            raise OutOfMemoryError("full")
        return real(*args, **options)

    monkeypatch.setattr(asking, "answer_ids", answer_ids)
    methods = [Method(label="full", policy=FullCache())]
    results = run_of(tiny, methods, limit=1).evaluate(tmp_path / "out")
    status = [row["status"] for row in results.rows]
    assert status == ["ok", "out of memory", "out of memory"]
    run_of(tiny, methods, limit=1).evaluate(tmp_path / "out")  # asks for what was lost again
    assert [record["status"] for record in records(tmp_path / "out")] == ["ok"] * 3


def test_questions_beyond_the_models_positions_are_recorded_as_too_long(demo, tmp_path):
    loaded = tiny_loaded(demo.tokenizer, positions=215)
    run = run_of(loaded, [Method(label="full", policy=FullCache())], limit=1)
    run.evaluate(tmp_path / "out")
    status = [record["status"] for record in records(tmp_path / "out")]
    assert status[0] == "ok"
    assert status[-1] == "too long"
