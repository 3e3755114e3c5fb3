"""What an evaluation with ten methods takes beside one with one method: a prompt is read once."""

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
from snapkv.app.models import LoadedModel
from snapkv_lab.evaluate.asking import Method
from snapkv_lab.evaluate.runner import Run
from snapkv_lab.evaluate.tasks import Needle
from snapkv_lab.experiments.experiment import Experiment, Shown, table
from snapkv_lab.experiments.records import Row
from snapkv_lab.measure.timing import Spent, alternate, ratios, spent_on, spread

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


EXPERIMENT = Experiment(
    name="sharing",
    title="Ten methods for little more than one",
    takes="ten minutes",
    measure=lambda given: measure(given.loaded),
    tables=lambda rows: [
        table(
            rows,
            {
                "prompt": "{length:,}",
                "one method, s": "{one_ms[p50]:seconds|.1f}",
                "ten methods, s": "{ten_ms[p50]:seconds|.1f}",
                "ratio": "{ratio[p50]:.2f}",
            },
        )
    ],
    shown={
        "sharing": Shown(
            "Ten methods for little more than one",
            ("prompt", "one method, s", "ten methods, s", "ratio"),
            ("1,024", "4,096"),
        )
    },
)


if __name__ == "__main__":
    EXPERIMENT.main()
