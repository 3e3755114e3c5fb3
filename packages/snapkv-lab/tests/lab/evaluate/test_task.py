"""A prompt is as long as its length allows, and never longer; names are drawn once."""

from functools import partial

import pytest

from snapkv.app.settings import GenerationSettings
from snapkv.errors import InvalidArgumentError, MissingDependencyError
from snapkv_lab.evaluate.haystack import distinct, words
from snapkv_lab.evaluate.sample import Sample
from snapkv_lab.evaluate.task import fitted, needed_tokens, percents
from snapkv_lab.evaluate.tasks import Lines, LongBench, Needle, RagPipeline, Ruler, Tracking

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


@pytest.mark.parametrize("length", [333])
@pytest.mark.parametrize("hint", [None, 40, 500])
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


@pytest.mark.parametrize(("count", "expected"), [(1, [50]), (4, [0, 33, 67, 100])])
def test_percents(count, expected):
    assert percents(count) == expected


def test_the_lists_are_whole_sorted_and_without_repetition():
    nouns, adjectives = words("noun"), words("adjective")
    assert (len(nouns), len(adjectives)) == (6782, 912)
    assert list(nouns) == sorted(set(nouns))
    both = words("noun", "adjective")
    assert set(both) == {*nouns, *adjectives}
    assert len(both) < len(nouns) + len(adjectives)  # some words are in both lists


def test_what_was_made_before_or_is_excluded_is_drawn_again():
    texts = iter(["a", "b", "a", "x", "b", "c"])
    assert distinct(lambda: next(texts), 3, besides=["x"]) == ["a", "b", "c"]


def test_without_the_package_the_command_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"wonderwords.*pip install 'wonderwords"):
        words("noun")


BAD = [
    (Needle, {"lengths": (4096, 299)}, "lengths: expected at least 300, got 299"),
    (Needle, {"depths": 102}, "depths: expected at most 101"),
    (Needle, {"variant": "fork"}, "variant: expected one of magic-number, sandwich, got 'fork'"),
    (Needle, {"haystack": "no/such"}, "no/such"),
    (Lines, {"lengths": ()}, "lengths: expected at least 1, got 0"),
    (LongBench, {"datasets": ("hotpot",)}, "got 'hotpot'; did you mean hotpotqa"),
    (LongBench, {"code_similarity": "jaro"}, "code_similarity: expected one of difflib"),
    (RagPipeline, {"documents": (10, 30), "retrieve": 20}, "retrieve: expected .* 30, got 20"),
    (Ruler, {"tasks": ("niah",)}, r"tasks: expected some of niah_single_1, .*, got niah;"),
    (Tracking, {"kinds": ()}, "kinds: expected some of .* got none"),
]


@pytest.mark.parametrize(("task", "settings", "message"), BAD)
def test_bad_settings_are_named(task, settings, message):
    with pytest.raises(InvalidArgumentError, match=message):
        task(**settings)
