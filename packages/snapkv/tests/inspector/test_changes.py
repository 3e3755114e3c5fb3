"""Differences of answers, by hand and by what they must add up to."""

from hypothesis import given
from hypothesis import strategies as st

from snapkv.inspector.words import word_changes

ANSWERS = st.text(st.sampled_from("ab .\n"), max_size=30)


def test_a_word_that_another_takes_the_place_of():
    assert word_changes("required by RFC 1952. Yes", "required by RFC 3339. Yes") == [
        ("same", "required by RFC"),
        ("gone", " 1952."),
        ("new", " 3339."),
        ("same", " Yes"),
    ]


def test_equal_answers_are_one_run():
    assert word_changes("nine o'clock", "nine o'clock") == [("same", "nine o'clock")]
    assert word_changes("", "") == []


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
