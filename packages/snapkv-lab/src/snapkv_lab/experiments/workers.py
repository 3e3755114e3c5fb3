"""What two workers take for an evaluation that one has answered: processes of one thread each.

    python -m snapkv_lab.experiments workers
        measure, write the rows, render the page (five minutes)
    python -m snapkv_lab.experiments workers --render   only render the page from the rows

Rows: `docs/results/workers.jsonl`. Page: `docs/results/tables/workers.md`.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from snapkv import FullCache, SnapKV
from snapkv.app.models import LoadedModel, load
from snapkv_lab.evaluate.asking import Method
from snapkv_lab.evaluate.runner import Run
from snapkv_lab.evaluate.store import Record, key
from snapkv_lab.evaluate.tasks import Needle
from snapkv_lab.evaluate.workers.base import Equipment, Executor
from snapkv_lab.evaluate.workers.processes import Processes
from snapkv_lab.experiments.environment import describe_environment
from snapkv_lab.experiments.records import (
    RESULTS,
    TABLES,
    Row,
    environment_line,
    markdown_table,
    measure_or_render,
    read_rows,
    tables_page,
)
from snapkv_lab.measure.timing import alternate, ratios, spent_on, spread

ROWS = RESULTS / "workers.jsonl"
PAGE = TABLES / "workers.md"

LENGTHS = (1024, 2048)
DEPTHS = 6
BUDGET = 256
ROUNDS = 3

_TIMES = ("first_token_ms", "token_ms")


def measure(
    loaded: LoadedModel,
    *,
    lengths: Sequence[int] = LENGTHS,
    depths: int = DEPTHS,
    budget: int = BUDGET,
    rounds: int = ROUNDS,
) -> Iterator[Row]:
    """One row: a needle grid by one worker and by two, in turn; time on the clock.

    Every worker has loaded the model before, so what is measured is the answering.

    Raises:
        ValueError: two workers answer something else than one.
    """
    methods = [
        Method(label="full", policy=FullCache()),
        Method(label=f"snapkv@{budget}", policy=SnapKV(budget)),
    ]
    task = Needle(lengths=tuple(lengths), depths=depths, cloze=True)
    run = Run(loaded=loaded, task=task, methods=methods, template="none")
    equipment = Equipment(load={"name": loaded.name}, threads=1)
    with ExitStack() as pools:
        counts = {"one": 1, "two": 2}
        work: dict[str, Callable[[], tuple[float, list[Record]]]] = {}
        for name, count in counts.items():
            pool = pools.enter_context(Processes(["cpu"] * count, equipment))
            _load_in(pool, run, count)
            work[name] = _evaluation(run, pool)
        found = alternate(work, rounds=rounds, warmup_rounds=0)
    answers = [given for runs in found.values() for _, given in runs]
    if any(given != answers[0] for given in answers):
        raise ValueError("expected the same answers of one worker and of two, got others")
    times = {name: [wall for wall, _ in runs] for name, runs in found.items()}
    yield {
        "benchmark": "workers",
        "lengths": list(lengths),
        "depths": depths,
        "methods": [method.describe() for method in methods],
        "prompts": len(lengths) * depths,
        "answers": len(answers[0]),
        "rounds": rounds,
        "processors": os.cpu_count(),
        "threads_each": equipment.threads,
        "one_ms": spread(times["one"], 0),
        "two_ms": spread(times["two"], 0),
        "speedup": spread(ratios(times["one"], times["two"]), 3),
    }


def _load_in(pool: Executor, run: Run, count: int) -> None:
    """Have every worker load the model: as many short prompts as there are workers."""
    shortest = min(run.task.describe()["lengths"])
    task = Needle(lengths=(shortest,), depths=count, cloze=True)
    few = Run(loaded=run.loaded, task=task, methods=run.methods[:1], template=run.template)
    with tempfile.TemporaryDirectory() as folder:
        few.into(Path(folder), executor=pool)


def _evaluation(run: Run, pool: Executor) -> Callable[[], tuple[float, list[Record]]]:
    """What does the run in a new folder; gives its milliseconds, and its answers by their keys."""

    def once() -> tuple[float, list[Record]]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            spent = spent_on(lambda: run.into(folder, executor=pool))
            records = sorted(read_rows(folder / "samples.jsonl"), key=key)
        untimed = [{k: v for k, v in each.items() if k not in _TIMES} for each in records]
        return spent.wall_ms, untimed

    return once


def render(rows: list[Row]) -> str:
    """The table of these rows."""
    lines = [
        [
            ", ".join(f"{length:,}" for length in row["lengths"]),
            f"{row['answers']:,}",
            f"{row['one_ms']['p50'] / 1000:.1f}",
            f"{row['two_ms']['p50'] / 1000:.1f}",
            f"{row['speedup']['p50']:.2f}",
        ]
        for row in rows
    ]
    header = ["prompt tokens", "answers", "one worker, s", "two workers, s", "times as fast"]
    table = markdown_table(header, lines)
    return tables_page("workers", "Two workers beside one", environment_line(rows), table)


def _measurements() -> Iterator[Row]:
    environment, loaded = describe_environment(), load("demo", device="cpu")
    for row in measure(loaded):
        print(row, file=sys.stderr)
        yield {**row, "model": loaded.description(), "environment": environment}


if __name__ == "__main__":
    measure_or_render(__doc__, _measurements, render, rows=ROWS, page=PAGE)
