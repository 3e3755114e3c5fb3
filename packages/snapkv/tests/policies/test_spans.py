"""Protected spans, by worked examples and against a plain loop."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from snapkv import ops
from snapkv.errors import InvalidArgumentError, InvalidTypeError
from snapkv.policies.spans import Spans


def test_protected_positions_precede_all_scores_and_count_in_the_budget():
    """Three of six positions are kept. If position 1 is protected, the third best is evicted."""
    scores = torch.tensor([[[4.0, 1.0, 2.0, 6.0, 3.0, 8.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]])
    assert ops.keep_best(scores, [3]).tolist() == [[[0, 3, 5], [3, 4, 5]]]
    protected = Spans.of("protect", [(1, 2)]).cover(torch.arange(6))[None, None]
    kept = ops.keep_best(scores, [3], protected=protected)
    assert kept.tolist() == [[[1, 3, 5], [1, 4, 5]]]


def test_heads_that_share_one_score_may_protect_different_slots():
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


# Overlapping, touching, nested and repeated spans in any order, and now and then a far one.
SPAN = st.tuples(st.integers(0, 40), st.integers(1, 12)).map(lambda one: (one[0], sum(one)))
FAR = st.just((2**40, 2**41))
POSITIONS = st.lists(st.one_of(st.integers(-3, 60), st.just(-(2**31))), max_size=30)


def covered_by_a_loop(spans, positions):
    """Compare every position with every span, in plain Python."""
    return [any(start <= one < stop for start, stop in spans) for one in positions]


@settings(max_examples=40)
@given(
    spans=st.lists(st.one_of(SPAN, FAR), max_size=12),
    positions=POSITIONS,
    dtype=st.sampled_from([torch.int64, torch.int32]),
)
def test_spans_cover_the_same_positions_as_a_plain_loop(spans, positions, dtype):
    given_positions = torch.tensor(positions, dtype=dtype)
    covered = Spans.of("protect", spans).cover(given_positions)
    assert covered.dtype == torch.bool
    assert covered.tolist() == covered_by_a_loop(spans, positions)


@pytest.mark.parametrize("shape", [(), (0,), (3, 1, 8), (2, 3, 4)], ids=str)
def test_positions_of_any_shape_and_layout_are_covered(shape):
    spans = [(1, 3), (5, 6)]
    positions = torch.arange(torch.tensor(shape).prod().item() if shape else 1).reshape(shape)
    positions = positions.expand(2, *shape).transpose(0, -1)
    covered = Spans.of("protect", spans).cover(positions)
    assert covered.shape == positions.shape
    assert covered.flatten().tolist() == covered_by_a_loop(spans, positions.flatten().tolist())


class Counting(TorchDispatchMode):
    """Counts the operations that torch runs."""

    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **(kwargs or {}))


def test_cover_runs_as_many_operations_for_1024_spans_as_for_one():
    """A request may have 1,024 spans, and requests in the same batch would have to wait."""
    counts = []
    for number in (1, 1024):
        spans = Spans.of("protect", [(3 * n, 3 * n + 2) for n in range(number)])
        with Counting() as counting:
            spans.cover(torch.arange(4096))
        counts.append(counting.operations)
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ("0:3", InvalidTypeError, "pairs of positions"),
        (7, InvalidTypeError, "pairs of positions"),
        ([7], InvalidTypeError, "got 7 of type int"),
        ([(1, 2, 3)], InvalidTypeError, "of type tuple"),
        ([(0, 2.5)], InvalidTypeError, "integer"),
        ([(False, 2)], InvalidTypeError, "integer"),
        ([(-1, 2)], InvalidArgumentError, "at least 0"),
        ([(2, 2)], InvalidArgumentError, "start < stop"),
        ([(3, 2)], InvalidArgumentError, "start < stop"),
        ([(0, 10**30)], InvalidArgumentError, "at most"),
    ],
)
def test_bad_spans_are_refused(wrong, error, words):
    with pytest.raises(error, match=words) as caught:
        Spans.of("protect", wrong)
    assert str(caught.value).startswith("protect: expected")
    assert "\n" not in str(caught.value)
