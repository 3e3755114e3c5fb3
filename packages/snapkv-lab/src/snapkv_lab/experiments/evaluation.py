"""The paper's experiments and later ones on the demo model, in a setting that two cores can run.

    python -m snapkv_lab.experiments evaluation needle
        run one experiment, or go on where it stopped
    python -m snapkv_lab.experiments evaluation            all of them
    python -m snapkv_lab.experiments evaluation --render
        draw the figures and the page from the answers there

Answers and rows: `docs/results/evaluation/NAME/`. Page: `docs/results/tables/evaluation.md`.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from snapkv.app.models import LoadedModel, load
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
from snapkv_lab.experiments.records import (
    RESULTS,
    TABLES,
    Row,
    markdown_table,
    read_rows,
    tables_page,
    write_rows,
)
from snapkv_lab.report.figures import draw
from snapkv_lab.report.page import method_table

FOLDER = RESULTS / "evaluation"
PAGE = TABLES / "evaluation.md"


@dataclass(frozen=True, kw_only=True)
class Experiment:
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
        """The experiment on a loaded model."""
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


EXPERIMENTS: dict[str, Experiment] = {
    "needle": Experiment(
        title="Needle in a haystack",
        task=lambda: Needle(
            lengths=(1024, 2048, 3072, 4096), digits=5, cloze=True, buffer_tokens=100
        ),
        methods=_rivals(256),
    ),
    "lines": Experiment(
        title="LongEval-Lines",
        task=lambda: Lines(
            lengths=(512, 1024, 1536), positions=3, samples_each=3, examples=3, cloze=True
        ),
        methods=_rivals(192),
    ),
    "ruler": Experiment(
        title="RULER at 2k",
        task=lambda: Ruler(lengths=(2048,), samples_each=2),
        methods=_few(512)[:3],
    ),
    "rag-citation": Experiment(
        title="Citations",
        task=lambda: RagCitation(documents=(10, 20), samples_each=12),
        methods=_few(512),
    ),
    "rag-position": Experiment(
        title="Lost in the middle",
        task=lambda: RagPosition(documents=(5, 10), samples_each=8, corpus="squad"),
        methods=_few(256),
    ),
    "rag-pipeline": Experiment(
        title="Retrieve, rerank, answer",
        task=lambda: RagPipeline(documents=(5, 10), samples_each=12, corpus="squad"),
        methods=_few(256),
    ),
    "turns": Experiment(
        title="Several turns",
        task=lambda: Turns(lengths=(1024, 2048), samples_each=5, cloze=True),
        methods=_over_turns(256),
    ),
    "tracking": Experiment(
        title="Long answers",
        task=lambda: Tracking(
            answer_tokens=(1024,), kinds=("copy", "cycle"), samples_each=2, cloze=True
        ),
        methods=_evicting(512),
    ),
    "hidden": Experiment(
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


def run(names: Sequence[str]) -> None:
    """Run experiments, each into its folder."""
    loaded = load("demo")
    for name in names:
        EXPERIMENTS[name].run(loaded).into(FOLDER / name, _say)


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


def render(found: dict[str, Results]) -> str:
    """The tables of these results, with their figures."""
    sections = [part for name, results in found.items() for part in _section(name, results)]
    measured = f"Scores are times 100; intervals: 95 %, {METHOD}"
    return tables_page("evaluation", "Tasks, answered by the demo model", measured, *sections)


def _section(name: str, results: Results) -> list[str]:
    run_block, table = results.run, method_table(results)
    model = run_block["model"]
    shown = [place for place, title in enumerate(table.headings) if title not in _NOT_SHOWN]
    rows = [[row[place] for place in shown] for row in table.rows]
    title = EXPERIMENTS[name].title
    return [
        f"## {title}",
        f"{model['name']} ({model['dtype']}, {model['attn_implementation']}), "
        f"{run_block['samples']} samples, data {run_block['data']}, torch {run_block['torch']}, "
        f"transformers {run_block['transformers']}.",
        markdown_table([table.headings[place] for place in shown], rows),
        f"![{title}: score by method](../{FOLDER.name}/{name}.png)",
    ]


_NOT_SHOWN = ("question", "ms/token")
"""Columns that are the same in every row, and times, which `speed.md` measures side by side."""


def _write(found: dict[str, Results]) -> None:
    PAGE.write_text(render(found), encoding="utf-8")
    for name, results in found.items():
        write_rows(FOLDER / name / "summary.jsonl", results.rows)
        Path(FOLDER / f"{name}.png").write_bytes(encoded(draw(results)["scores"], ".png"))


def main() -> None:
    """Run what was asked for, then render."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(EXPERIMENTS)}; all by default")
    parser.add_argument("--render", action="store_true")
    given = parser.parse_args()
    if unknown := set(given.names) - set(EXPERIMENTS):
        parser.error(f"expected names of {', '.join(EXPERIMENTS)}, got {', '.join(unknown)}")
    if not given.render:
        run(given.names or list(EXPERIMENTS))
    _write(measured())


if __name__ == "__main__":
    main()
