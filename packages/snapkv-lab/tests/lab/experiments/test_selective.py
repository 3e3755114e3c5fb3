"""What reading with fewer tokens gains and loses: how it is measured, and the page of rows."""

import copy

import pytest
import torch

from snapkv import SnapKV
from snapkv.app.models import LoadedModel
from snapkv.app.prefills import Exact
from snapkv_lab.experiments import selective
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
