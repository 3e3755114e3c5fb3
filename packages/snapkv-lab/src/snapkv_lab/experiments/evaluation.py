"""The paper's experiments and later ones on the demo model, in a setting that two cores can run.

Answers and rows: `docs/results/evaluation/NAME/`.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from snapkv.app.models import LoadedModel
from snapkv.cache.paging import PageRecall
from snapkv.policies import (
    H2O,
    RKV,
    TOVA,
    Compactor,
    FullCache,
    KeyDiff,
    KVzip,
    SnapKV,
    StreamingLLM,
)
from snapkv_lab.drawing import encoded
from snapkv_lab.evaluate.asking import Method
from snapkv_lab.evaluate.intervals import METHOD
from snapkv_lab.evaluate.runner import Results, Run
from snapkv_lab.evaluate.sample import Setting
from snapkv_lab.evaluate.store import key
from snapkv_lab.evaluate.summary import summarise
from snapkv_lab.evaluate.task import Task
from snapkv_lab.evaluate.tasks import (
    Lines,
    Needle,
    RagCitation,
    RagPipeline,
    RagPosition,
    Ruler,
    Tracking,
    Turns,
)
from snapkv_lab.experiments.experiment import Experiment, Given, Shown
from snapkv_lab.experiments.records import RESULTS, Row, markdown_table, read_rows, write_rows
from snapkv_lab.report.figures import draw
from snapkv_lab.report.page import method_table

FOLDER = RESULTS / "evaluation"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A task with the methods that answer it, always on the demo model without a chat template.

    Attributes:
        title: heading of its section.
        task: what is asked.
        methods: what answers.
        question: whether it is visible to the vote.
        reference_loss: whether the loss of the references is taken too.
    """

    title: str
    task: Callable[[], Task]
    methods: Sequence[Method]
    question: Setting = "visible"
    reference_loss: bool = False

    def run(self, loaded: LoadedModel) -> Run:
        """It on a loaded model."""
        return Run(
            loaded=loaded,
            task=self.task(),
            methods=self.methods,
            questions=(self.question,),
            template="none",
            reference_loss=self.reference_loss,
        )


def _rivals(budget: int) -> list[Method]:
    """The full cache, SnapKV with and without pooling, and the two oldest rivals."""
    window = {"window_size": 16}
    return [
        Method(label="full", policy=FullCache()),
        Method(label="SnapKV, kernel 13", policy=SnapKV(budget, kernel_size=13, **window)),
        Method(label="SnapKV, kernel 5", policy=SnapKV(budget, kernel_size=5, **window)),
        Method(label="SnapKV without pooling", policy=SnapKV(budget, kernel_size=1, **window)),
        Method(label="StreamingLLM", policy=StreamingLLM(budget)),
        Method(label="H2O", policy=H2O(budget)),
    ]


def _few(budget: int) -> list[Method]:
    """The full cache, SnapKV with wide pooling, and the two oldest rivals."""
    left_out = ("SnapKV, kernel 5", "SnapKV without pooling")
    return [method for method in _rivals(budget) if method.label not in left_out]


def _over_turns(budget: int) -> list[Method]:
    """The full cache, what stays with the first turn's choice, what votes anew and what recalls."""
    wide = SnapKV(budget, kernel_size=13, window_size=16)
    return [
        Method(label="full", policy=FullCache()),
        Method(label="SnapKV", policy=wide),
        Method(label="SnapKV, compressed every turn", policy=wide, later="compress"),
        Method(label="SnapKV, recalled from the host", policy=wide, later="recall"),
        Method(
            label="SnapKV, recalled, 4 pages of 16 tokens every step",
            policy=wide,
            later=PageRecall(4),
        ),
        Method(label="StreamingLLM", policy=StreamingLLM(budget)),
    ]


def _evicting(budget: int) -> list[Method]:
    """The full cache, and methods that evict while they generate."""
    policies = (StreamingLLM(budget), H2O(budget), TOVA(budget), RKV(budget))
    found = [Method(label=type(policy).__name__, policy=policy) for policy in policies]
    return [Method(label="full", policy=FullCache()), *found]


def _without_a_question(tokens: int, ratios: Sequence[int]) -> list[Method]:
    """The full cache, and at every ratio what chooses before it knows the question."""
    found = [Method(label="full", policy=FullCache())]
    for ratio in ratios:
        kept = tokens // ratio
        policies = (KVzip(kept), Compactor(kept), KeyDiff(kept), SnapKV(kept))
        found += [
            Method(label=f"{type(policy).__name__} {ratio}:1", policy=policy) for policy in policies
        ]
    return found


EXPERIMENTS: dict[str, Comparison] = {
    "needle": Comparison(
        title="Needle in a haystack",
        task=lambda: Needle(
            lengths=(1024, 2048, 3072, 4096), digits=5, cloze=True, buffer_tokens=100
        ),
        methods=_rivals(256),
    ),
    "lines": Comparison(
        title="LongEval-Lines",
        task=lambda: Lines(
            lengths=(512, 1024, 1536), positions=3, samples_each=3, examples=3, cloze=True
        ),
        methods=_rivals(192),
    ),
    "ruler": Comparison(
        title="RULER at 2k",
        task=lambda: Ruler(lengths=(2048,), samples_each=2),
        methods=_few(512)[:3],
    ),
    "rag-citation": Comparison(
        title="Citations",
        task=lambda: RagCitation(documents=(10, 20), samples_each=12),
        methods=_few(512),
    ),
    "rag-position": Comparison(
        title="Lost in the middle",
        task=lambda: RagPosition(documents=(5, 10), samples_each=8, corpus="squad"),
        methods=_few(256),
    ),
    "rag-pipeline": Comparison(
        title="Retrieve, rerank, answer",
        task=lambda: RagPipeline(documents=(5, 10), samples_each=12, corpus="squad"),
        methods=_few(256),
    ),
    "turns": Comparison(
        title="Several turns",
        task=lambda: Turns(lengths=(1024, 2048), samples_each=5, cloze=True),
        methods=_over_turns(256),
    ),
    "tracking": Comparison(
        title="Long answers",
        task=lambda: Tracking(
            answer_tokens=(1024,), kinds=("copy", "cycle"), samples_each=2, cloze=True
        ),
        methods=_evicting(512),
    ),
    "hidden": Comparison(
        title="A question that comes later",
        task=lambda: Ruler(
            tasks=("niah_single_1", "niah_single_2", "niah_multikey_1"),
            lengths=(4096,),
            samples_each=2,
        ),
        methods=_without_a_question(4096, (8, 16, 32)),
        question="hidden",
        reference_loss=True,
    ),
}


def run(given: Given) -> Iterator[Row]:
    """Run experiments, each into its folder, or go on where they stopped."""
    for name in given.parts:
        EXPERIMENTS[name].run(given.loaded).into(FOLDER / name, _say)
    yield from ()


def _say(description: str, done: int, total: int) -> None:
    print(f"{done} of {total}: {description}", file=sys.stderr)


def measured() -> dict[str, Results]:
    """The experiments that have been run to their end, summarised from their answers."""
    return {
        name: Results(
            folder=FOLDER / name,
            run=json.loads((FOLDER / name / "run.json").read_text("utf-8")),
            task=experiment.task(),
            rows=_summary(FOLDER / name, experiment.task()),
        )
        for name, experiment in EXPERIMENTS.items()
        if (FOLDER / name / "summary.jsonl").exists()
    }


def _summary(folder: Path, task: Task) -> list[Row]:
    """The rows of all answers in a folder."""
    answers = read_rows(folder / "samples.jsonl")
    return summarise(answers, [key(answer) for answer in answers], task)


def _tables(found: dict[str, Results]) -> Iterator[str]:
    for name, results in found.items():
        shown = method_table(results)
        places = [place for place, title in enumerate(shown.headings) if title not in _NOT_SHOWN]
        title, block = EXPERIMENTS[name].title, results.run
        yield f"## {title}"
        yield (
            "{model[name]} ({model[dtype]}, {model[attn_implementation]}), {samples} samples, "
            "data {data}, torch {torch}, transformers {transformers}.".format_map(block)
        )
        yield markdown_table(
            [shown.headings[place] for place in places],
            [[row[place] for place in places] for row in shown.rows],
        )
        yield f"![{title}: score by method](../{FOLDER.name}/{name}.png)"


_NOT_SHOWN = ("question", "ms/token")
"""Columns that are the same in every row, and times, which `speed.md` measures side by side."""


def _drawn(found: dict[str, Results]) -> None:
    for name, results in found.items():
        write_rows(FOLDER / name / "summary.jsonl", results.rows)
        Path(FOLDER / f"{name}.png").write_bytes(encoded(draw(results)["scores"], ".png"))


EXPERIMENT = Experiment(
    name="evaluation",
    title="Tasks, answered by the demo model",
    takes="hours",
    measure=run,
    resumes=True,
    parts=tuple(EXPERIMENTS),
    read=measured,
    measured=lambda found: f"Scores are times 100; intervals: 95 %, {METHOD}",
    tables=_tables,
    drawn=_drawn,
    shown={
        "ruler": Shown("RULER at 2k", ("method", "mean", "difference")),
        "long-answers": Shown("Long answers", ("method", "mean", "difference")),
        "turns": Shown(
            "Several turns",
            ("method", "1", "5", "mean", "cache"),
            (
                "full",
                "SnapKV",
                "SnapKV, compressed every turn",
                "SnapKV, recalled from the host",
                "SnapKV, recalled, 4 pages of 16 tokens every step",
            ),
        ),
    },
)


if __name__ == "__main__":
    EXPERIMENT.main()
