"""The texts and questions that compare methods, and how answers are counted."""

from dataclasses import replace

import pytest
import torch

from snapkv import TOVA, FullCache, default_policy
from snapkv_lab.experiments.prompts import read_prompt
from snapkv_lab.experiments.texts import (
    Count,
    ReadText,
    TextMaker,
    count_right,
    list_answers,
    make_prompts,
    score_answer,
    score_tokens,
)
from snapkv_lab.experiments.ways import right_cell


@pytest.fixture(scope="module")
def make(demo):
    return TextMaker(demo.tokenizer)


@pytest.fixture(scope="module")
def text(make):
    return make.needles(360, 0)


@pytest.fixture(scope="module")
def read(tiny, text):
    return ReadText(tiny.model, text.ids)


def test_question_after_a_copied_cache_is_read_as_one_prompt(tiny, text, read):
    question = text.cases[0].question_ids
    both = [*text.ids, *question]
    branch = read.with_question(question)
    whole = read_prompt(tiny.model, both, recorded_queries=len(both))
    close = {"atol": 1e-3, "rtol": 1e-4}
    torch.testing.assert_close(branch.last_logits, whole.last_logits, **close)
    for one, other in zip(branch.layers, whole.layers, strict=True):
        torch.testing.assert_close(one.queries, other.queries, **close)
        torch.testing.assert_close(one.keys, other.keys, **close)


def by_hand(prompt, cache, case):
    """Return whether the whole answer is most likely, and its loss after the first token."""
    last, answer = prompt.last_logits[0, -1], case.answer_ids
    if case.between_ids:
        ids = torch.tensor([case.between_ids])
        last = prompt.model(ids, past_key_values=cache).logits[0, -1]
    logits = [last]
    for token in answer[:-1]:
        logits.append(prompt.model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1])
    losses = [-float(own.log_softmax(-1)[t]) for own, t in zip(logits, answer, strict=True)]
    right = [int(own.argmax()) for own in logits] == list(answer)
    return right, sum(losses[1:]) / (len(answer) - 1)


@torch.inference_mode()
@pytest.mark.parametrize("policy", [FullCache(), default_policy(64), TOVA(64)], ids=repr)
def test_scored_answer_equals_one_by_hand(policy, text, read):
    (visible, *_), (hidden,) = (
        list(make_prompts(read, text, each)) for each in ("visible", "hidden")
    )
    assert hidden.prompt.prompt_tokens == len(text.ids) < visible.prompt.prompt_tokens
    for prompt, case in ((visible.prompt, visible.cases[0]), (hidden.prompt, hidden.cases[0])):
        whole = replace(case, parts=[range(len(case.answer_ids))])
        found = score_answer(prompt, prompt.compressed(policy), whole)
        right, loss = by_hand(prompt, prompt.compressed(policy), case)
        assert found["right"] == [int(right)]
        assert found["nll"] == pytest.approx(loss, abs=1e-3)
        is_right, losses = score_tokens(prompt, prompt.compressed(policy), case)
        assert len(is_right) == len(losses) == len(case.answer_ids)
        assert float(losses[1:].mean()) == pytest.approx(loss, abs=1e-3)


def test_texts_hold_the_answers_to_their_questions(demo, make):
    decode = demo.tokenizer.decode
    for text in (
        make.needles(400, 1),
        make.lines(512, 0, questions=2),
        make.quotes(512, 0, questions=2),
        make.rag(6, 0, questions=2),
    ):
        for case in text.cases:
            assert decode(case.answer_ids).strip() in " ".join(decode(text.ids).split()), text.name
            [part] = case.parts
            assert list(part) == list(range(1, len(case.answer_ids)))


def test_passage_quotes_eight_tokens_and_asks_for_those_that_follow(make):
    text = make.passages(512, 100, 0)
    [case] = text.cases
    quoted = case.question_ids[-8:]
    [place] = [i for i in range(512) if list(text.ids[i : i + 8]) == list(quoted)]
    assert 128 <= place < 256
    assert list(case.answer_ids) == list(text.ids[place + 8 : place + 108])


def _made_rows():
    """Yield two questions of one group, and one text of which only the loss is measured."""
    for text, full, of_methods in (
        ("a", [1], [[0], [1]]),
        ("b", [1], [[1], [1]]),
        ("c", [], [[], []]),
    ):
        yield {
            "text": text,
            "group": "numbers" if full else "prose",
            "full": {"right": full, "nll": 0.5},
            "answers": [
                {"method": method, "right": right, "nll": 0.75}
                for method, right in zip("ab", of_methods, strict=True)
            ],
        }


def test_right_answers_count_only_parts_that_the_full_cache_has_right():
    answers = list_answers(_made_rows())
    first, second = ([each for each in answers if each["method"] == name] for name in "ab")
    assert (count_right(first), count_right(second)) == (Count(1, 2), Count(2, 2))
    assert right_cell({"answers": first}) == "0.50 of 2 (0.09 to 0.91), +0.25"


def test_count_interval_equals_wilsons():
    assert Count(5, 10).interval() == pytest.approx((0.237, 0.763), abs=5e-4)
    assert Count(0, 0).interval() == (0, 1)
    assert Count(4, 4).interval()[1] == 1
