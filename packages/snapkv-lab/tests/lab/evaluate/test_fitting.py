"""A prompt is as long as its length allows, and never longer."""

from functools import partial

import pytest

from snapkv.app.settings import GenerationSettings
from snapkv_lab.evaluate.sample import Sample
from snapkv_lab.evaluate.task import fitted, needed_tokens, percents

NEW_TOKENS = 7


def lines(count, text="The grass is green.\n"):
    return Sample(
        name="lines",
        cell={},
        context=text * count,
        question="What is green?",
        answer_start="It is",
        references=("grass",),
        settings=GenerationSettings(max_new_tokens=NEW_TOKENS),
    )


@pytest.mark.parametrize("length", [100, 333, 1000])
@pytest.mark.parametrize("hint", [None, 0, 40, 500])
def test_one_more_part_would_not_fit(demo, length, hint):
    sample, parts = fitted(lines, demo.tokenizer, length, least=1, most=10_000, hint=hint)
    assert needed_tokens(sample, demo.tokenizer) <= length
    assert sample == lines(parts)
    if hint in (None, 500):  # a hint below the truth limits what is tried
        assert needed_tokens(lines(parts + 1), demo.tokenizer) > length


def test_the_answer_and_the_chat_template_count(demo):
    turn = demo.tokenizer.apply_chat_template(
        [{"role": "user", "content": lines(3).context + lines(3).question}],
        add_generation_prompt=True,
        tokenize=False,
    )
    tokens = demo.tokenizer(turn + "It is", add_special_tokens=False)["input_ids"]
    assert needed_tokens(lines(3), demo.tokenizer) == len(tokens) + NEW_TOKENS


def test_there_are_no_more_parts_than_there_are(demo):
    assert fitted(lines, demo.tokenizer, 1000, least=1, most=5)[1] == 5


def test_parts_of_uneven_length_never_exceed_it(demo):
    def uneven(count):
        return lines(1, "".join("word " * (1 + i * i % 17) for i in range(count)))

    sample, _ = fitted(uneven, demo.tokenizer, 400, least=0, most=1000)
    assert 350 < needed_tokens(sample, demo.tokenizer) <= 400


def test_what_cannot_fit_is_none(demo):
    search = partial(fitted, lines, demo.tokenizer, 200, most=1000)
    assert search(least=100) is None
    assert search(least=100, hint=200) is None
    assert search(least=0) is not None


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, [50]), (2, [0, 100]), (4, [0, 33, 67, 100]), (5, [0, 25, 50, 75, 100])],
)
def test_percents(count, expected):
    assert percents(count) == expected
