"""What two workers take for an evaluation that one has answered: processes of one thread each."""

import os
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
from snapkv_lab.experiments.experiment import Experiment, Given, Shown, table
from snapkv_lab.experiments.records import (
    Row,
    read_rows,
)
from snapkv_lab.measure.timing import alternate, ratios, spent_on, spread

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


def _measured(given: Given) -> Iterator[Row]:
    loaded = load("demo", device="cpu")
    return (row | {"model": loaded.description()} for row in measure(loaded))


EXPERIMENT = Experiment(
    name="workers",
    title="Two workers beside one",
    measure=_measured,
    tables=lambda rows: [
        table(
            rows,
            {
                "prompt tokens": lambda row: ", ".join(f"{each:,}" for each in row["lengths"]),
                "answers": "{answers:,}",
                "one worker, s": "{one_ms[p50]:seconds|.1f}",
                "two workers, s": "{two_ms[p50]:seconds|.1f}",
                "times as fast": "{speedup[p50]:.2f}",
            },
        )
    ],
    shown={
        "workers": Shown(
            "Two workers beside one",
            ("prompt tokens", "answers", "one worker, s", "two workers, s", "times as fast"),
        )
    },
)


if __name__ == "__main__":
    EXPERIMENT.main()
