"""Instructions before a text: the same every time, checked by a program, protected if asked."""

import pytest

from snapkv import SnapKV
from snapkv.app.answering import answer
from snapkv.errors import InvalidArgumentError
from snapkv_lab.evaluate.tasks import Instructions

SMALL = {"lengths": (320,), "samples_each": 1}


def test_every_instruction_is_asked_of_the_same_text(demo):
    samples = list(Instructions(**SMALL).samples(demo.tokenizer))
    assert samples == list(Instructions(**SMALL).samples(demo.tokenizer))
    assert [sample.cell["instruction"] for sample in samples] == ["code", "begin", "end"]
    assert len({sample.context for sample in samples}) == 1
    assert all(sample.references[0] in sample.context for sample in samples)
    ids = samples[0].prompt(demo.tokenizer, "tokenizer", "visible").token_ids(demo.tokenizer)
    assert 250 < ids.shape[1] <= 320


def test_checks_need_no_judge(demo):
    task = Instructions(**SMALL)
    code, begin, end = task.samples(demo.tokenizer)
    word, first, mark = (sample.references[0] for sample in (code, begin, end))
    right = f"{first.title()}, the word is {word}. {mark}"
    assert [task.score(sample, right) for sample in (code, begin, end)] == [1, 1, 1]
    assert [task.score(sample, f"no {mark} no") for sample in (code, begin, end)] == [0, 0, 0]
    cloze = Instructions(cloze=True, **SMALL)
    samples = list(cloze.samples(demo.tokenizer))
    assert cloze.score(samples[2], f' "{mark}" and on') == 1
    assert samples[1].answer_start == "- Begin your answer with the word"


def test_protected_instructions_stay(demo):
    """A window that knows no question drops them, unless they are protected."""
    task = Instructions(protect=True, cloze=True, **SMALL)
    sample = next(iter(task.samples(demo.tokenizer)))
    prompt = sample.prompt(demo.tokenizer, "tokenizer", "hidden")
    policy = SnapKV(budget=96, window_size=16)
    given = answer(demo, prompt, policy, sample.settings, protection=sample.protection)
    ((start, stop),) = given.protected
    kept = demo.tokenizer.decode(prompt.token_ids(demo.tokenizer)[0, start:stop])
    assert kept.strip().startswith("Instructions for your answer:")
    assert sample.references[0] in kept


def test_lengths_without_room_are_refused():
    with pytest.raises(InvalidArgumentError, match="lengths"):
        Instructions(lengths=(100,))
