"""Times that can be compared on a busy machine: alternating runs, medians, ratios of pairs."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import quantiles
from typing import Any

import torch


def milliseconds(work: Callable[[], Any]) -> float:
    """How long the work takes, the accelerator's part included."""
    _synchronize()
    start = time.perf_counter()
    work()
    _synchronize()
    return 1000 * (time.perf_counter() - start)


def alternate(
    contenders: Mapping[str, Callable[[], float]], *, rounds: int, warmup_rounds: int
) -> dict[str, list[float]]:
    """Run all contenders in every round, each round starting with another one.

    Noise of the machine then hits all of them alike, and the times of one round make a pair.

    Args:
        contenders: name to a function that does one run and returns its time in ms.
        rounds: rounds that count.
        warmup_rounds: rounds before them that do not.

    Returns:
        The times of each contender in ms, in the order of the rounds.
    """
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in range(warmup_rounds + rounds):
        start = index % len(names)
        for name in names[start:] + names[:start]:
            times[name].append(contenders[name]())
    return {name: of_name[warmup_rounds:] for name, of_name in times.items()}


def ratios(times: Sequence[float], base: Sequence[float]) -> list[float]:
    """The ratio of each pair of times."""
    return [one / other for one, other in zip(times, base, strict=True)]


def spread(values: Sequence[float], digits: int) -> dict[str, float]:
    """The 20th, 50th and 80th percentile."""
    cuts = quantiles(values, n=10, method="inclusive")
    return {f"p{10 * cut}": round(cuts[cut - 1], digits) for cut in (2, 5, 8)}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
