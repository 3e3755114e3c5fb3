"""What an evaluation with ten methods takes beside one with one method: a prompt is read once.

    python -m snapkv_lab.experiments sharing  measure, write the rows, render the page (ten minutes)

Rows: `docs/results/sharing.jsonl`. Page: `docs/results/tables/sharing.md`.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from snapkv import (
    H2O,
    TOVA,
    AdaKV,
    CriticalKV,
    ExpectedAttention,
    FullCache,
    KeyDiff,
    PyramidKV,
    SnapKV,
    StreamingLLM,
)
from snapkv.app.models import LoadedModel, load
from snapkv_lab.evaluate.asking import Method
from snapkv_lab.evaluate.runner import Run
from snapkv_lab.evaluate.tasks import Needle
from snapkv_lab.experiments.environment import describe_environment
from snapkv_lab.experiments.records import (
    RESULTS,
    TABLES,
    Row,
    environment_line,
    markdown_table,
    measure_or_render,
    tables_page,
)
from snapkv_lab.measure.timing import Spent, alternate, ratios, spent_on, spread

ROWS = RESULTS / "sharing.jsonl"
PAGE = TABLES / "sharing.md"

LENGTHS = (1024, 2048, 4096)
ROUNDS = 3


def ten_methods(budget: int) -> list[Method]:
    """Methods that score by the last queries, by all of them, by keys alone, and by nothing."""
    policies = [
        SnapKV(budget),
        FullCache(),
        AdaKV(SnapKV(budget)),
        PyramidKV(budget),
        CriticalKV(SnapKV(budget)),
        ExpectedAttention(budget),
        KeyDiff(budget),
        H2O(budget),
        TOVA(budget),
        StreamingLLM(budget),
    ]
    labels = [f"{number} {policy.name}" for number, policy in enumerate(policies)]
    return [Method(label=lb, policy=p) for lb, p in zip(labels, policies, strict=True)]


def measure(
    loaded: LoadedModel, *, lengths: Sequence[int] = LENGTHS, rounds: int = ROUNDS
) -> Iterator[Row]:
    """A row per length: one method, and ten in one run; in processor time, all threads together."""
    for length in lengths:
        methods = ten_methods(length // 4)
        work = {
            "one": _evaluation(loaded, length, methods[:1]),
            "ten": _evaluation(loaded, length, methods),
        }
        times = alternate(work, rounds=rounds, warmup_rounds=0)
        cpu = {name: [spent.cpu_ms for spent in runs] for name, runs in times.items()}
        yield {
            "benchmark": "sharing",
            "length": length,
            "budget": length // 4,
            "methods": [method.describe() for method in methods],
            "rounds": rounds,
            "one_ms": spread(cpu["one"], 0),
            "ten_ms": spread(cpu["ten"], 0),
            "ratio": spread(ratios(cpu["ten"], cpu["one"]), 3),
        }


def _evaluation(loaded: LoadedModel, length: int, methods: Sequence[Method]) -> Callable[[], Spent]:
    task = Needle(lengths=(length,), depths=1, cloze=True)
    run = Run(loaded=loaded, task=task, methods=methods, template="none")

    def once() -> Spent:
        with tempfile.TemporaryDirectory() as folder:
            return spent_on(lambda: run.into(Path(folder)))

    return once


def render(rows: list[Row]) -> str:
    """The table of these rows."""
    lines = [
        [
            f"{row['length']:,}",
            f"{row['one_ms']['p50'] / 1000:.1f}",
            f"{row['ten_ms']['p50'] / 1000:.1f}",
            f"{row['ratio']['p50']:.2f}",
        ]
        for row in rows
    ]
    table = markdown_table(["prompt", "one method, s", "ten methods, s", "ratio"], lines)
    return tables_page(
        "sharing", "Ten methods for little more than one", environment_line(rows), table
    )


def _measurements() -> Iterator[Row]:
    environment, loaded = describe_environment(), load("demo")
    for row in measure(loaded):
        print(row, file=sys.stderr)
        yield {**row, "model": loaded.description(), "environment": environment}


if __name__ == "__main__":
    measure_or_render(__doc__, _measurements, render, rows=ROWS, page=PAGE)
