"""What is said of a cache and its answer, and how answers differ."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapkv.page.words import answer_sentence, kept_sentence, word_changes

ANSWERS = st.text(st.sampled_from("ab .\n"), max_size=30)


@pytest.mark.parametrize(
    ("given_numbers", "expected"),
    [
        (
            (255.7, 2858, 0, 11 * 2**20, 2**27),
            "The cache keeps 256 of 2,858 prompt tokens per head on average: 11.0 MiB instead of "
            "128.0 MiB (8.6%).",
        ),
        (
            (64, 100, 3, 999, 1000),
            "The cache keeps 64 of 100 prompt tokens per head on average, and 3 later ones: 999 B "
            "instead of 1000 B (99%).",
        ),
    ],
)
def test_what_was_kept_of_how_much(given_numbers, expected):
    assert kept_sentence(*given_numbers) == expected


def test_an_answer_that_was_cut_off_is_the_same_only_as_far_as_it_goes():
    assert answer_sentence(True, None) == "Its answer is the same as the full cache's."
    assert answer_sentence(True, 8).endswith("full cache's, as far as both go: 8 tokens.")
    assert answer_sentence(False, 8) == "Its answer differs from the full cache's."


def test_a_word_that_another_takes_the_place_of():
    assert word_changes("required by RFC 1952. Yes", "required by RFC 3339. Yes") == [
        ("same", "required by RFC"),
        ("gone", " 1952."),
        ("new", " 3339."),
        ("same", " Yes"),
    ]


def test_long_answers_that_go_in_circles_are_compared_as_a_whole_where_they_part():
    """At once: small models repeat themselves."""
    before, after = "yes" + " yes no" * 3000, "yes" + " yes no no" * 3000
    changes = word_changes(before, after)
    assert changes[0] == ("same", "yes yes no")
    assert [kind for kind, _ in changes] == ["same", "gone", "new"]
    assert "".join(text for kind, text in changes if kind != "new") == before
    assert "".join(text for kind, text in changes if kind != "gone") == after


@given(ANSWERS, ANSWERS)
def test_the_runs_make_both_answers(before, after):
    changes = word_changes(before, after)
    assert "".join(text for kind, text in changes if kind != "new") == before
    assert "".join(text for kind, text in changes if kind != "gone") == after
    assert all(text for _, text in changes)
