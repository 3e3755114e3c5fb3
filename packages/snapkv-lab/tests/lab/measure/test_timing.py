import time
from collections import Counter
from itertools import pairwise, permutations

import pytest

from snapkv_lab.measure.timing import measure_time, pair_ratios, percentiles, run_alternating


def turns_of(names, rounds, warmup_rounds=0):
    """Return the names in the order of their runs, and the numbers of the runs by name."""
    order = []

    def contender(name):
        def run():
            order.append(name)
            return float(len(order))

        return run

    times = run_alternating(
        {name: contender(name) for name in names}, rounds=rounds, warmup_rounds=warmup_rounds
    )
    return "".join(order), times


def test_contenders_take_turns_and_each_round_starts_with_another():
    order, times = turns_of("abc", rounds=2, warmup_rounds=1)
    assert order == "abcbcacab"
    assert times == {"a": [6.0, 8.0], "b": [4.0, 9.0], "c": [5.0, 7.0]}
    assert turns_of("abcd", rounds=4)[0] == "abdcbcadcdbadacb"


@pytest.mark.parametrize(("names", "rounds"), [("ab", 2), ("abc", 6), ("abcd", 4), ("abcde", 10)])
def test_each_contender_follows_each_other_one_equally_often(names, rounds):
    order, _ = turns_of(names, rounds)
    turns = [order[start : start + len(names)] for start in range(0, len(order), len(names))]
    assert {"".join(sorted(turn)) for turn in turns} == {names}
    pairs = Counter(pair for turn in turns for pair in pairwise(turn))
    assert set(pairs) == set(permutations(names, 2))
    assert set(pairs.values()) == {rounds // len(names)}


def test_percentiles_and_ratios_of_pairs_equal_worked_examples():
    assert percentiles([5, 1, 4, 2, 3], 1) == {"p20": 1.8, "p50": 3, "p80": 4.2}
    assert pair_ratios([2, 9], [1, 3]) == [2, 3]


def test_sleeping_takes_clock_time_but_no_processor_time():
    spent = measure_time(lambda: time.sleep(0.05))
    assert spent.wall_ms >= 49
    assert spent.cpu_ms < 25
