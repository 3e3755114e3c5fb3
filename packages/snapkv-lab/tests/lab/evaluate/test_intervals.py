"""Intervals by the bootstrap: by hand, by all draws, by plain loops, and how often they hold."""

import random
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapkv_lab.evaluate.intervals import mean_interval


def by_loops(columns):
    """One draw after the other."""
    drawn = []
    for cells in columns:
        if any(len(cell) == 1 for cell in cells):
            cells = [[fmean(cell) for cell in cells]]
        drawn.append(cells)
    if not drawn or any(len(cell) < 2 for cells in drawn for cell in cells):
        return None
    draws = np.random.RandomState(0)
    indices = [
        [draws.randint(len(cell), size=(2000, len(cell))) for cell in cells] for cells in drawn
    ]
    means = []
    for number in range(2000):
        of_columns = []
        for cells, of_cells in zip(drawn, indices, strict=True):
            of_columns.append(
                fmean(
                    fmean(cell[place] for place in places[number])
                    for cell, places in zip(cells, of_cells, strict=True)
                )
            )
        means.append(fmean(of_columns))
    means.sort()
    return means[50], means[-51]


def test_four_samples_by_hand():
    # Of 256 draws 81 have no right answer, which is more than 2.5 %. One has four right ones
    # (0.4 %) and 12 three (4.7 %): without the highest 2.5 % three of four are left.
    assert mean_interval([[[0.0, 0.0, 0.0, 1.0]]]) == (0.0, 0.75)

    # Their mean is 1/2 in a quarter of all draws, 1 in another.


def test_turns_of_a_conversation_are_drawn_together_by_hand():
    """Of two conversations one is right in both turns: a draw has the right one 0, 1 or 2 times.

    Apart, a draw of neither turn would have it with a chance of 1/16; together it is 1/4.
    """
    turn, of_turn = [0.0, 1.0], ("a", "b")
    four = [[turn]] * 4
    assert mean_interval([[turn]]) == (0.0, 1.0)
    assert mean_interval(four, [[of_turn]] * 4) == (0.0, 1.0)
    low, high = mean_interval(four)
    assert 0.0 < low < high < 1.0
    # What one turn wins the other loses: every draw has the same mean.
    assert mean_interval([[turn], [[1.0, 0.0]]], [[of_turn]] * 2) == (0.5, 0.5)


def test_turns_of_other_conversations_are_drawn_apart():
    """As samples that are no turns; and so is a cell in which one of them has no answer."""
    one, other = [0.0, 0.0, 1.0, 1.0], [1.0, 0.0, 1.0]
    apart = mean_interval([[one], [other]])
    assert mean_interval([[one], [other]], [[None], [None]]) == apart
    assert mean_interval([[one], [other]], [[("a", "b", "c", "d")], [("a", "b", "c")]]) == apart
    assert mean_interval([[one], [one]], [[("a", "b", "c", "d")], [("e", "f", "g", "h")]]) == (
        mean_interval([[one], [one]])
    )


def test_where_a_cell_is_one_sample_the_cells_are_drawn():
    assert mean_interval([[[0.0], [1.0]]]) == mean_interval([[[0.0, 1.0]]]) == (0.0, 1.0)
    assert mean_interval([[[0.0, 0.5], [1.0]]]) == mean_interval([[[0.25, 1.0]]]) == (0.25, 1.0)


@pytest.mark.parametrize(
    "columns", [[], [[]], [[[]]], [[[1.0]]], [[[0.0, 1.0]], [[1.0]]], [[[0.0, 1.0]], []]], ids=str
)
def test_nothing_to_draw_from_gives_none(columns):
    assert mean_interval(columns) is None


def test_differences_that_cancel_out_are_zero():
    """Not what is left of 0.1 + 0.2 - 0.3."""
    low, high = mean_interval([[[0.1, 0.1]], [[0.2, 0.2]], [[-0.3, -0.3]]])
    assert (low, high) == (0.0, 0.0)


scores = st.sampled_from((0.0, 0.2, 1 / 3, 0.5, 1.0))


@settings(deadline=None)
@given(
    st.lists(st.lists(st.lists(scores, min_size=1, max_size=4), min_size=1, max_size=3), max_size=3)
)
def test_it_is_what_plain_loops_find(columns):
    expected, found = by_loops(columns), mean_interval(columns)
    if expected is None:
        assert found is None
    else:
        assert found == pytest.approx(expected, abs=1e-9)


def test_the_truth_lies_in_the_interval_of_a_mean_over_turns():
    """Where all turns of a conversation go well together or ill; drawn apart it is missed often."""
    draw, times, held, apart = random.Random(11), 400, 0, 0
    names = [[tuple(map(str, range(30)))]] * 4
    for _ in range(times):
        luck = [draw.random() < 0.5 for _ in range(30)]
        turns = [[[float(draw.random() < (0.9 if good else 0.1)) for good in luck]] for _ in names]
        low, high = mean_interval(turns, names)
        held += low <= 0.5 <= high
        low, high = mean_interval(turns)
        apart += low <= 0.5 <= high
    assert 0.9 <= held / times <= 0.985
    assert apart / times < 0.85
