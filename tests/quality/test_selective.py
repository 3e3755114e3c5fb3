"""What reading with fewer tokens gains and loses: how it is measured, and the page of rows."""

import copy

import pytest
import torch
from benchmarks import selective, selective_page
from benchmarks.records import read_rows

from snapkv import SnapKV
from snapkv.app.models import LoadedModel
from snapkv.app.prefills import Exact
from tests.families import tiny_model


@pytest.fixture
def small_budget(monkeypatch):
    monkeypatch.setattr(
        selective, "default_policy", lambda budget: SnapKV(budget // 8, window_size=8)
    )


@pytest.fixture
def tiny():
    return LoadedModel(model=tiny_model("llama"), tokenizer=None, name="tiny", revision=None)


def test_all_tokens_going_on_is_exact_reading_and_fewer_are_not(
    small_budget, tiny, random_document
):
    question = selective.Question(
        prompt=torch.tensor([random_document.prompt_ids]),
        answer=torch.tensor([random_document.answer_ids]),
    )
    ways = (Exact(), selective.selective(2, 1.0), selective.selective(2, 0.1))
    exact, whole, part = selective.quality(tiny, {"made": [question, question]}, ways)
    assert exact["prompts"] == 2
    assert exact["prompt_tokens"] == 150
    assert exact["loss"] == whole["loss"] != part["loss"]


def test_ratios_are_against_exact_reading(small_budget, tiny):
    ids = torch.arange(60)[None]
    ways = (Exact(), selective.selective(1, 0.1))
    exact, part = selective.times(copy.copy(tiny.model), ids, ways, 2)
    assert exact["ratio"] == {"p50": 1, "min": 1, "max": 1}
    assert part["ratio"]["min"] <= part["ratio"]["p50"] <= part["ratio"]["max"]
    assert len(part["samples_ms"]) == 2


def test_questions_have_their_answers_in_the_prompt_and_end_where_it_begins(demo):
    for task, asked in selective.questions(demo.tokenizer, selective.SMALL).items():
        for each in asked:
            text, answer = (demo.tokenizer.decode(ids[0]) for ids in (each.prompt, each.answer))
            assert answer.strip().isdigit(), task
            place = text.index(answer)
            begun = text[place - 12 : place]
            assert text.endswith(begun), (task, begun, text[-30:])


def row(task, way, right, prompts=20):
    return {
        "part": "quality",
        "task": task,
        "prefill": way.describe(),
        "policy": {"budget": 256},
        "prompts": prompts,
        "prompt_tokens": 1500,
        "right": right,
        "loss": 0.1,
        "model": {"name": "m", "dtype": "d", "attn_implementation": "a", "device": "c"},
        "environment": {
            **dict.fromkeys(("processor", "torch", "transformers", "commit"), "x"),
            "threads": 1,
        },
    }


def test_the_verdict_by_hand():
    """One of 40 is 2.5 points over all, and 5 points of the task that lost it."""
    ways = (Exact(), selective.selective(15, 0.3), selective.selective(15, 0.1))
    rights = {"one": (20, 20, 20), "two": (18, 17, 16)}
    rows = [
        row(task, way, right)
        for task, own in rights.items()
        for way, right in zip(ways, own, strict=True)
    ]
    page = selective_page.render(rows)
    said = " ".join(page.split())
    assert "over all prompts: selective, 15, 30%. In each task: none." in said
    assert "| selective, 15, 10% | 1.00 (0.100) | 0.80 (0.100) | 0.90 |" in page


def test_the_committed_rows_are_of_every_way_and_one_budget():
    rows = read_rows(selective.ROWS)
    by_part = {part: [row for row in rows if row["part"] == part] for part in selective.PARTS}
    assert [row["prefill"] for row in by_part["time"]] == [
        way.describe() for way in selective.TIMED
    ]
    assert len(by_part["shape"]) == 2
    for task in ("magic number", "needle", "lines"):
        own = [row["prefill"] for row in by_part["quality"] if row["task"] == task]
        assert own == [way.describe() for way in selective.WAYS]
    assert {row["policy"]["budget"] for row in rows} == {selective.BUDGET}
