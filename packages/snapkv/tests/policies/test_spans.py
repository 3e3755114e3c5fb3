"""Spans that must stay, worked by hand."""

import pytest
import torch

from snapkv import ops
from snapkv.errors import InvalidArgumentError, InvalidTypeError
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
