"""Where two answers part."""

from types import SimpleNamespace

import pytest

from snapkv.app.comparison import Comparison


def answer(*token_ids):
    return SimpleNamespace(text=" ".join(map(str, token_ids)), token_ids=token_ids)


@pytest.mark.parametrize(
    ("ours", "theirs", "place"),
    [
        ((1, 2, 3), (1, 2, 3), None),
        ((1, 2, 3), (1, 7, 3), 1),
        ((1, 2), (1, 2, 3), 2),
        ((1, 2, 3), (1, 2), 2),
        ((), (5,), 0),
    ],
)
def test_the_first_difference_is_the_first_token_that_only_one_has(ours, theirs, place):
    found = Comparison.of(answer(*ours), answer(*theirs))
    assert found == Comparison(same=place is None, first_difference=place)


def test_answers_that_read_the_same_are_the_same():
    ours, theirs = answer(1, 2), answer(1, 2)
    theirs.token_ids = (3,)  # the same letters in another token
    assert Comparison.of(ours, theirs).same


def test_a_check_looks_no_further_than_it_is_told():
    ours, theirs = answer(1, 2, 3, 4), answer(1, 2, 9)
    assert Comparison.of_first(ours, theirs, 2).same
    assert Comparison.of_first(ours, theirs, 3).first_difference == 2
    assert Comparison.of_first(answer(1, 2), answer(1, 2), 8).same  # both end there
