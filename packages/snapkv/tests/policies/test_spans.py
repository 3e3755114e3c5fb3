"""Spans that must stay and segments that share a budget, worked by hand."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from snapkv import ops
from snapkv.errors import InvalidArgumentError, InvalidTypeError
from snapkv.policies.fair import Segments, fair_shares, keep_fair
from snapkv.policies.spans import Spans


def test_protected_positions_come_before_all_scores_and_count():
    """Six positions, three stay. With 1 protected, the third best has to go."""
    scores = torch.tensor([[[4.0, 1.0, 2.0, 6.0, 3.0, 8.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]])
    assert ops.keep_best(scores, [3]).tolist() == [[[0, 3, 5], [3, 4, 5]]]
    protected = Spans.of("protect", [(1, 2)]).cover(torch.arange(6))[None, None]
    kept = ops.keep_best(scores, [3], protected=protected)
    assert kept.tolist() == [[[1, 3, 5], [1, 4, 5]]]


def test_each_head_may_protect_slots_of_its_own_where_all_share_one_score():
    scores = torch.tensor([[[4.0, 3.0, 2.0, 1.0]]])
    protected = torch.tensor([[[False, False, True, False], [False, False, False, True]]])
    assert ops.keep_best(scores, [2], protected=protected).tolist() == [[[0, 2], [0, 3]]]


def test_spans_are_merged_and_counted():
    spans = Spans.of("protect", [(5, 8), [0, 2], (2, 3), (6, 7)])
    assert spans.parts == ((0, 3), (5, 8))
    assert spans.tokens == 6
    assert [spans.among_first(count) for count in (0, 2, 4, 6, 100)] == [0, 2, 3, 4, 6]
    assert spans.cover(torch.tensor([-1, 0, 2, 3, 4, 5, 7, 8])).tolist() == [
        *(False, True, True, False),
        *(False, True, True, False),
    ]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("0:3", InvalidTypeError, "pairs of positions"),
        (7, InvalidTypeError, "pairs of positions"),
        ([7], InvalidTypeError, "among them"),
        ([(1, 2, 3)], InvalidTypeError, "among them"),
        ([(0, 2.5)], InvalidTypeError, "integer"),
        ([(False, 2)], InvalidTypeError, "integer"),
        ([(-1, 2)], InvalidArgumentError, "at least 0"),
        ([(2, 2)], InvalidArgumentError, "below its stop"),
        ([(3, 2)], InvalidArgumentError, "below its stop"),
        ([(0, 10**30)], InvalidArgumentError, "at most"),
    ],
)
def test_bad_spans_are_refused(given, error, words):
    with pytest.raises(error, match=words) as caught:
        Spans.of("protect", given)
    assert str(caught.value).startswith("protect: expected")
    assert "\n" not in str(caught.value)


def test_every_segment_keeps_its_best_in_its_share():
    """Twelve positions, six stay: 2 of the 4 rules, 3 of the 6 of the text, 1 of the other 2."""
    scores = torch.tensor([[[0.0, 1, 2, 3, 10, 20, 30, 40, 50, 60, 5, 4]]])
    segments = Segments.of("fair", {"rules": (0, 4), "text": (4, 10)})
    assert segments.tokens(12) == [4, 6, 2]
    kept = keep_fair(scores, [6], [12], segments, None)
    assert kept.tolist() == [[[2, 3, 7, 8, 9, 10]]]
    protected = torch.zeros(1, 1, 12, dtype=torch.bool)
    protected[..., 0] = True
    kept = keep_fair(scores, [6], [12], segments, protected)
    assert kept.tolist() == [[[0, 3, 7, 8, 9, 10]]]


def test_a_share_grows_to_what_is_protected_in_it():
    assert fair_shares([4, 6, 2], 6, [0, 0, 0]) == [2, 3, 1]
    assert fair_shares([4, 6, 2], 6, [4, 0, 0]) == [4, 1, 1]
    assert fair_shares([0, 6, 0], 3, [0, 0, 0]) == [0, 3, 0]
    assert fair_shares([0, 0], 0, [0, 0]) == [0, 0]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=5),
    st.integers(0, 100),
)
@example([(3, 3), (4, 0)], 50)
@settings(deadline=None)
def test_fair_shares_add_up_and_stay_within_what_there_is(segments, percent):
    tokens = [count for count, _ in segments]
    least = [min(bound, count) for count, bound in segments]
    total = max(sum(least), sum(tokens) * percent // 100)
    shares = fair_shares(tokens, total, least)
    assert sum(shares) == total
    assert all(low <= share <= most for low, share, most in zip(least, shares, tokens, strict=True))


def test_rows_with_pads_share_by_their_own_lengths():
    """The second row has two pads: its segment begins two slots later."""
    scores = torch.arange(16.0).reshape(2, 1, 8).remainder(8)
    segments = Segments.of("fair", {"a": (0, 2)})
    kept = keep_fair(scores, [4, 3], [8, 6], segments, None)
    assert kept.tolist() == [[[1, 5, 6, 7]], [[-1, 3, 6, 7]]]
