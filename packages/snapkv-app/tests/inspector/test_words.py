"""Sentences about a cache and its answer, and the differences between answers."""

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
        (
            (90, 90, 0, 1001, 1000),
            "The cache keeps 90 of 90 prompt tokens per head on average: 1001 B instead of 1000 B "
            "(101%).",
        ),
    ],
)
def test_kept_sentence_names_kept_and_total_tokens(given_numbers, expected):
    assert kept_sentence(*given_numbers) == expected


def test_cut_off_answer_is_called_equal_up_to_its_length():
    assert answer_sentence(True, None) == "Its answer is the same as the full cache's."
    assert answer_sentence(True, 8).endswith("full cache's, as far as both go: 8 tokens.")
    assert answer_sentence(False, 8) == "Its answer differs from the full cache's."


def test_replaced_word_is_marked_as_gone_and_new():
    assert word_changes("required by RFC 1952. Yes", "required by RFC 3339. Yes") == [
        ("same", "required by RFC"),
        ("gone", " 1952."),
        ("new", " 3339."),
        ("same", " Yes"),
    ]


def test_repetitive_long_answers_are_compared_in_one_piece():
    """The comparison is fast, because small models repeat themselves."""
    before, after = "yes" + " yes no" * 3000, "yes" + " yes no no" * 3000
    changes = word_changes(before, after)
    assert changes[0] == ("same", "yes yes no")
    assert [kind for kind, _ in changes] == ["same", "gone", "new"]
    assert "".join(text for kind, text in changes if kind != "new") == before
    assert "".join(text for kind, text in changes if kind != "gone") == after


@given(ANSWERS, ANSWERS)
def test_word_changes_add_up_to_both_answers(before, after):
    changes = word_changes(before, after)
    assert "".join(text for kind, text in changes if kind != "new") == before
    assert "".join(text for kind, text in changes if kind != "gone") == after
    assert all(text for _, text in changes)
