"""Keys and values: in the right form, and never twice where once is promised."""

import random
import re
import uuid

import pytest

from snapkv.errors import MissingDependencyError
from snapkv_lab.evaluate.haystack import distinct, identifier, number, word_key, words


def test_the_lists_are_whole_sorted_and_without_repetition():
    nouns, adjectives = words("noun"), words("adjective")
    assert (len(nouns), len(adjectives)) == (6782, 912)
    assert list(nouns) == sorted(set(nouns))
    both = words("noun", "adjective")
    assert set(both) == {*nouns, *adjectives}
    assert len(both) < len(nouns) + len(adjectives)  # some words are in both lists


def test_a_key_is_an_adjective_and_a_noun():
    key = word_key(random.Random(0))
    cuts = [i for i, letter in enumerate(key) if letter == "-"]
    assert any(key[:i] in words("adjective") and key[i + 1 :] in words("noun") for i in cuts)


def test_numbers_have_their_digits():
    draw = random.Random(0)
    assert all(re.fullmatch(r"[1-9]\d{4}", number(draw, 5)) for _ in range(200))


def test_an_identifier_is_a_random_uuid():
    assert uuid.UUID(identifier(random.Random(0))).version == 4


def test_the_same_seed_draws_the_same():
    drawn = [(word_key(d), number(d, 7), identifier(d)) for d in map(random.Random, (1, 1, 2))]
    assert drawn[0] == drawn[1] != drawn[2]


def test_what_was_made_before_or_is_excluded_is_drawn_again():
    texts = iter(["a", "b", "a", "x", "b", "c"])
    assert distinct(lambda: next(texts), 3, besides=["x"]) == ["a", "b", "c"]


def test_without_the_package_the_command_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"wonderwords.*pip install 'wonderwords"):
        words("noun")
