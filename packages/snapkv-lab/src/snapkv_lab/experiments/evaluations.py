"""The results of the laboratory's own commands on the demo model.

`evaluation` runs tasks in a size for two cores; answers and rows are in
`docs/results/evaluation/NAME/`. `studies` repeats the paper's observations; the records are also in
`snapkv-results/studies`, where a stopped run continues.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from snapkv import H2O, FullCache, SnapKV, StreamingLLM
from snapkv.policies import Policy, default_policy
from snapkv_lab import drawing
from snapkv_lab.evaluate.asking import Method
from snapkv_lab.evaluate.intervals import METHOD
from snapkv_lab.evaluate.runner import Results, Run
from snapkv_lab.evaluate.store import record_key
from snapkv_lab.evaluate.summary import summarise
from snapkv_lab.evaluate.task import Task
from snapkv_lab.evaluate.tasks import Lines, Needle, Ruler
from snapkv_lab.experiments.experiment import Experiment, RunContext, describe_run
from snapkv_lab.experiments.records import RESULTS
from snapkv_lab.report.figures import draw
from snapkv_lab.report.page import method_table
from snapkv_lab.report.tables import markdown_table
from snapkv_lab.rows import Row, read_rows, select_rows, write_rows
from snapkv_lab.study import HitRate, Instructions, Overlap, Position, Sensitivity, Study

FOLDER = RESULTS / "evaluation"


class TaskComparison(NamedTuple):
    """A task, and the number of tokens that its methods keep. No chat template is used.

    `title` is the heading of its section.
    """

    title: str
    task: Callable[[], Task]
    budget: int

    @property
    def methods(self) -> list[Method]:
        """The full cache, the default policy, SnapKV as in the paper, StreamingLLM and H2O, as new
        objects.
        """
        policies: dict[str, Policy] = {"full": FullCache(), "default": default_policy(self.budget)}
        policies |= {made.__name__: made(self.budget) for made in (SnapKV, StreamingLLM, H2O)}
        return [Method(label=label, policy=policy) for label, policy in policies.items()]


def _say(description: str, done: int, total: int) -> None:
    print(f"{done} of {total}: {description}", file=sys.stderr)


COMPARISONS = {
    "needle": TaskComparison(
        "Needle in a haystack",
        partial(
            Needle,
            lengths=(1024, 2048, 3072, 4096),
            depths=8,
            permutations=2,
            digits=5,
            cloze=True,
            buffer_tokens=100,
        ),
        256,
    ),
    "lines": TaskComparison(
        "LongEval-Lines",
        partial(
            Lines, lengths=(512, 1024, 1536), positions=5, samples_each=4, examples=3, cloze=True
        ),
        192,
    ),
    "ruler": TaskComparison(
        "RULER, a quarter of the tokens", partial(Ruler, lengths=(2048,), samples_each=5), 512
    ),
}


def _compare(name: str, context: RunContext) -> Iterator[Row]:
    """Run a task with all methods, and store answers and rows in a folder of its own. No row is
    yielded.

    Args:
        name: a key of `COMPARISONS`.
        context: the run. If its results are not to be stored, the folder is a temporary one.

    Raises:
        InvalidArgumentError: the folder holds another run.
        OutputError: an answer cannot be written.
    """
    folder = FOLDER if context.is_stored else Path(tempfile.mkdtemp())
    own = COMPARISONS[name]
    run = Run(loaded=context.loaded, template="none", task=own.task(), methods=own.methods)
    run.evaluate(folder / name, _say)
    yield from ()


def load_comparisons() -> dict[str, Results]:
    """Return the results of all comparisons that have been completed, by name.

    They are summarised again from the stored answers.
    """
    comparisons = {}
    for name, comparison in COMPARISONS.items():
        folder, task = FOLDER / name, comparison.task()
        if (folder / "summary.jsonl").exists():
            answers = read_rows(folder / "samples.jsonl")
            comparisons[name] = Results(
                folder=folder,
                run=json.loads((folder / "run.json").read_text("utf-8")),
                task=task,
                rows=summarise(answers, [record_key(answer) for answer in answers], task),
            )
    return comparisons


_NOT_SHOWN = ("question", "ms/token")
"""Columns that are equal in every row, and times, which `speed.md` compares better."""


def _evaluation_tables(comparisons: dict[str, Results]) -> Iterator[str]:
    """Yield for each comparison a heading, a sentence about the run, a table, and a figure."""
    for name, results in comparisons.items():
        table, title = method_table(results), COMPARISONS[name].title
        places = [place for place, each in enumerate(table.headings) if each not in _NOT_SHOWN]
        yield f"## {title}"
        yield (
            "{model[name]} ({model[dtype]}, {model[attn_implementation]}), {samples} samples, "
            "data {data}, torch {torch}, transformers {transformers}.".format_map(results.run)
        )
        yield markdown_table(
            [table.headings[place] for place in places],
            [[row[place] for place in places] for row in table.rows],
        )
        yield f"![{title}: score by method](../{FOLDER.name}/{name}.png)"


def _evaluation_drawn(comparisons: dict[str, Results]) -> None:
    """Write the summary and the figure of each comparison again."""
    for name, results in comparisons.items():
        write_rows(FOLDER / name / "summary.jsonl", results.rows)
        Path(FOLDER / f"{name}.png").write_bytes(
            drawing.encode_figure(draw(results)["scores"], ".png")
        )


EVALUATION = Experiment(
    name="evaluation",
    title="Tasks, answered by the demo model",
    duration="an hour",
    measure={name: partial(_compare, name) for name in COMPARISONS},
    load=load_comparisons,
    origin=lambda found: f"Scores are times 100; intervals: 95 %, {METHOD}",
    tables=_evaluation_tables,
    draw=_evaluation_drawn,
)

FIGURES = RESULTS / "studies"

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        HitRate(samples=2),
        Overlap(samples=2),
        Instructions(samples=2),
        Position(samples=2),
        Sensitivity(kernels=(1, 5, 7, 13), length=2048, digits=5, depths=5, template="none"),
    )
}


def _study(name: str, context: RunContext) -> Iterator[Row]:
    """Run a study, and yield a row that describes the run, followed by the rows of the study, whose
    numbers are rounded to four digits. The records are stored in a folder, in which a stopped run
    continues.
    """
    findings = STUDIES[name].measure(
        context.loaded, Path("snapkv-results") / "studies" / name, _say
    )
    yield describe_run(context) | {"run": findings.run}
    for row in findings.rows:
        yield {
            key: round(each, 4) if isinstance(each, float) else each for key, each in row.items()
        }


def _findings(rows: list[Row]) -> Iterator[tuple[str, Study, list[Row]]]:
    for name, study in STUDIES.items():
        yield name, study, [row for row in select_rows(rows, study=name) if "run" not in row]


def _studies_tables(rows: list[Row]) -> Iterator[str]:
    for name, study, own in _findings(rows):
        table = study.table(own)
        yield f"## {name}"
        yield f"![{name}](../studies/{name}.svg)"
        yield f"{table.title[0].upper()}{table.title[1:]}."
        yield markdown_table(table.headings, table.rows)


def _studies_drawn(rows: list[Row]) -> None:
    FIGURES.mkdir(exist_ok=True)
    for name, study, own in _findings(rows):
        drawing.save_figure(study.figure(own), FIGURES / f"{name}.svg", drawing.PLAIN, dpi=100)


OBSERVATIONS = Experiment(
    name="studies",
    title="The paper's observations",
    measure={name: partial(_study, name) for name in STUDIES},
    part_key="study",
    describe=lambda _: {},  # the row of the run has it for all rows
    tables=_studies_tables,
    draw=_studies_drawn,
)
