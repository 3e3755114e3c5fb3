"""Times that can be compared on a busy machine: alternating runs, medians, ratios of pairs."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import quantiles
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")


class TimeSpent(NamedTuple):
    """What one run took."""

    wall_ms: float
    cpu_ms: float


def measure_time(work: Callable[[], Any]) -> TimeSpent:
    synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    synchronize()
    return TimeSpent(1000 * (time.perf_counter() - wall), 1000 * (time.process_time() - cpu))


def run_alternating(
    contenders: Mapping[str, Callable[[], T]], *, rounds: int, warmup_rounds: int
) -> dict[str, list[T]]:
    """Run all contenders in every round, each round in another order.

    Noise of the machine then hits all of them alike, and the times of one round make a pair. So
    does what a run leaves behind: in a cycle of rounds each comes after each of the others equally
    often (the design of Williams, 1949). What each gave is in the order of the rounds.
    """
    names = list(contenders)
    times: dict[str, list[T]] = {name: [] for name in names}
    for index in range(warmup_rounds + rounds):
        for place in _order(len(names), index):
            times[names[place]].append(contenders[names[place]]())
    return {name: of_name[warmup_rounds:] for name, of_name in times.items()}


def _order(count: int, index: int) -> list[int]:
    """The places of a round: 0, 1, -1, 2, -2, ... from another one each round.

    An odd count takes two cycles until all is even, the second in reverse.
    """
    zigzag = [(place + 1) // 2 * (1 if place % 2 else -1) for place in range(count)]
    order = [(place + index) % count for place in zigzag]
    return order[::-1] if count % 2 and index // count % 2 else order


def pair_ratios(times: Sequence[float], base: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(times, base, strict=True)]


def percentiles(values: Sequence[float], digits: int) -> dict[str, float]:
    cuts = quantiles(values, n=10, method="inclusive")
    return {f"p{10 * cut}": round(cuts[cut - 1], digits) for cut in (2, 5, 8)}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
