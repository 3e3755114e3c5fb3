"""Times that can be compared on a busy machine: runs in turns, medians, and ratios of pairs."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import quantiles
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")


class TimeSpent(NamedTuple):
    """The time that a function took, in milliseconds.

    `wall_ms` is the time by the clock, and `cpu_ms` that of all threads together.
    """

    wall_ms: float
    cpu_ms: float


def measure_time(work: Callable[[], Any]) -> TimeSpent:
    """Run a function and return the time that it took. Its result is ignored. CUDA is synchronized
    before and after it.
    """
    synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    synchronize()
    return TimeSpent(1000 * (time.perf_counter() - wall), 1000 * (time.process_time() - cpu))


def run_alternating(
    contenders: Mapping[str, Callable[[], T]], *, rounds: int, warmup_rounds: int
) -> dict[str, list[T]]:
    """Call all functions once in each round, in another order from round to round.

    Noise of the machine then affects all of them alike, and the times of one round make a pair. In
    a cycle of rounds each contender also runs after each other one equally often, so that what a
    run leaves behind affects all alike (the design of Williams, 1949).

    Args:
        contenders: the functions by name.
        rounds: how many rounds are in the result.
        warmup_rounds: how many rounds run before, whose results are thrown away.

    Returns:
        The results of each contender, in the order of the rounds.
    """
    names = list(contenders)
    times: dict[str, list[T]] = {name: [] for name in names}
    for index in range(warmup_rounds + rounds):
        for place in _order(len(names), index):
            times[names[place]].append(contenders[names[place]]())
    return {name: of_name[warmup_rounds:] for name, of_name in times.items()}


def _order(count: int, index: int) -> list[int]:
    """Return the order in which the contenders are run in round `index`, as their numbers.

    It is 0, 1, -1, 2, -2, ... shifted by `index`. If `count` is odd, only two cycles of rounds are
    balanced; the second cycle is reversed.
    """
    zigzag = [(place + 1) // 2 * (1 if place % 2 else -1) for place in range(count)]
    order = [(place + index) % count for place in zigzag]
    return order[::-1] if count % 2 and index // count % 2 else order


def pair_ratios(times: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return each time divided by the base time of the same round.

    Both lists must have the same length.
    """
    return [one / other for one, other in zip(times, base, strict=True)]


def percentiles(values: Sequence[float], digits: int) -> dict[str, float]:
    """Return the 20th, 50th and 80th percentile of at least two values, by the keys "p20", "p50"
    and "p80".

    Args:
        values: the values, in any order.
        digits: how many digits after the point the percentiles are rounded to.
    """
    cuts = quantiles(values, n=10, method="inclusive")
    return {f"p{10 * cut}": round(cuts[cut - 1], digits) for cut in (2, 5, 8)}


def synchronize() -> None:
    """Wait until the current CUDA device has finished its work. Without CUDA, do nothing."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
