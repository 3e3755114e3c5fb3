"""Intervals by the bootstrap: by hand, by all draws, by plain loops, and how often they hold."""

import itertools
import random
from collections import Counter
from fractions import Fraction
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapkv_lab.evaluate.intervals import RESAMPLES, mean_interval


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


def all_draws(cell):
    """How likely every mean is, of the n^n draws that there are."""
    drawn = itertools.product(map(Fraction, cell), repeat=len(cell))
    counts = Counter(sum(samples) / len(cell) for samples in drawn)
    return {mean: count / len(cell) ** len(cell) for mean, count in counts.items()}


def test_four_samples_by_hand():
    # Of 256 draws 81 have no right answer, which is more than 2.5 %. One has four right ones
    # (0.4 %) and 12 three (4.7 %): without the highest 2.5 % three of four are left.
    assert mean_interval([[[0.0, 0.0, 0.0, 1.0]]]) == (0.0, 0.75)


def test_two_columns_by_hand():
    # A column that is always right and one that is right half of the time, two samples each.
    assert mean_interval([[[1.0, 1.0]], [[0.0, 1.0]]]) == (0.5, 1.0)
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
    "columns",
    [[], [[]], [[[]]], [[[1.0]]], [[[0.0, 1.0]], [[1.0]]], [[[0.0, 1.0]], []]],
    ids=str,
)
def test_nothing_to_draw_from_gives_none(columns):
    assert mean_interval(columns) is None


def test_samples_that_are_alike_have_no_spread():
    assert mean_interval([[[1.0] * 5], [[0.0] * 3]]) == (0.5, 0.5)


def test_differences_that_cancel_out_are_zero():
    """Not what is left of 0.1 + 0.2 - 0.3."""
    low, high = mean_interval([[[0.1, 0.1]], [[0.2, 0.2]], [[-0.3, -0.3]]])
    assert (low, high) == (0.0, 0.0)


@pytest.mark.parametrize(
    "cell",
    [(0, 1), (0, 0, 1), (0, 1, 1, 1), (0, 0.25, 1), (0, 0.5, 0.5, 1), (0,) * 4 + (1,)],
    ids=str,
)
def test_the_ends_are_the_quantiles_of_all_draws_there_are(cell):
    chances = all_draws(cell)
    of_2_000 = 3 * (0.025 * 0.975 / 2_000) ** 0.5  # three standard deviations
    for end, quantile in zip(mean_interval([[cell]]), (0.025, 0.975), strict=True):
        below = sum(chance for mean, chance in chances.items() if mean < end - 1e-9)
        not_above = sum(chance for mean, chance in chances.items() if mean <= end + 1e-9)
        assert below - of_2_000 <= quantile <= not_above + of_2_000
        assert min(abs(float(mean) - end) for mean in chances) < 1e-9


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


def test_the_same_numbers_give_the_same_interval_and_leave_chance_alone():
    np.random.seed(3)
    before = np.random.get_state()[1].tolist()
    columns = [[[0.0, 0.25, 1.0], [0.5, 0.0]]]
    assert mean_interval(columns) == mean_interval(columns)
    assert np.random.get_state()[1].tolist() == before


@pytest.mark.parametrize(("chance", "samples"), [(0.5, 30), (0.3, 60), (0.8, 60)])
def test_the_truth_lies_in_the_interval_about_as_often_as_it_says(chance, samples):
    """95 % of the time, less what the bootstrap is known to miss of few samples."""
    draw, times = random.Random(f"{chance}/{samples}"), 400
    held = 0
    for _ in range(times):
        low, high = mean_interval([[[float(draw.random() < chance) for _ in range(samples)]]])
        held += low <= chance <= high
    assert 0.91 <= held / times <= 0.985


def test_the_truth_lies_in_the_interval_of_a_mean_over_cells_and_of_a_paired_difference():
    draw, times, held, seen = random.Random(7), 400, 0, 0
    for _ in range(times):
        cells = [[float(draw.random() < chance) for _ in range(20)] for chance in (0.2, 0.5, 0.8)]
        low, high = mean_interval([[cell] for cell in cells])
        held += low <= 0.5 <= high
        pairs = [float(draw.random() < 0.5) - float(draw.random() < 0.5) for _ in range(40)]
        low, high = mean_interval([[pairs]])
        seen += not low <= 0 <= high
    assert 0.9 <= held / times <= 0.985
    assert 0.015 <= seen / times <= 0.1  # a difference where there is none


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


def test_two_and_a_half_percent_are_left_out_on_either_side():
    assert RESAMPLES * 0.025 == 50
