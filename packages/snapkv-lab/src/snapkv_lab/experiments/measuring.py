"""How experiments measure: contenders that take turns, and functions in their own processes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from snapkv_lab.measure.held_bytes import FREED_MEMORY_HANDED_BACK
from snapkv_lab.measure.timing import (
    TimeSpent,
    measure_time,
    pair_ratios,
    percentiles,
    run_alternating,
)

Spread = dict[str, float]


class InterleavedTimings:
    """The times of contenders that took turns, so that noise affected all of them alike.

    All rounds run when the object is made. Iterating over it gives the names of the contenders.

    Args:
        work: a function per contender, by name. If it returns a float, that is its time in
            milliseconds; otherwise the call is timed.
        rounds: how many rounds are measured.
        warmup_rounds: how many rounds run before them.
    """

    def __init__(
        self, work: Mapping[Any, Callable[[], Any]], *, rounds: int, warmup_rounds: int = 1
    ) -> None:
        timed = {name: lambda one=one: _timed(one) for name, one in work.items()}
        self.runs = run_alternating(timed, rounds=rounds, warmup_rounds=warmup_rounds)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.runs)

    def samples(self, name: Any, clock: str = "wall_ms") -> list[float]:
        """Return a list of the times in milliseconds, one for each round.

        "wall_ms" is the time by the clock, and "cpu_ms" that of all threads together.
        """
        return [getattr(run, clock) for run in self.runs[name]]

    def ms(self, name: Any, digits: int) -> Spread:
        """Return the percentiles "p20", "p50" and "p80" of the times in milliseconds."""
        return percentiles(self.samples(name), digits)

    def ratio(self, name: Any, base: Any, clock: str = "wall_ms") -> Spread:
        """Return the percentiles "p20", "p50" and "p80" of the ratios of `name` to `base`.

        A ratio is that of the two times in the same round.
        """
        return percentiles(pair_ratios(self.samples(name, clock), self.samples(base, clock)), 4)


def _timed(work: Callable[[], Any]) -> TimeSpent:
    results: list[Any] = []
    spent = measure_time(lambda: results.append(work()))
    return spent._replace(wall_ms=results[0]) if isinstance(results[0], float) else spent


def run_in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a new process and return its result.

    This is for measurements of peak memory. Arguments and result are passed as JSON, so the result
    is made of JSON's types. The function must be at the top level of a module that can be imported.
    Linux only.

    Raises:
        CalledProcessError: the function failed. The process has printed the reason to standard
            error.
    """
    code = (
        f"import json, {function.__module__} as module; "
        f"print(json.dumps(module.{function.__name__}(*json.loads({json.dumps(arguments)!r}))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **FREED_MEMORY_HANDED_BACK},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])
