"""`snapkv eval TASK`: the paper's experiments, every method in one run."""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from snapkv.cli import panels
from snapkv.cli.options import ReadingOptions, SweepOptions, with_options
from snapkv.cli.outputs import RESULTS, Output, WritingOptions, results_folder
from snapkv.cli.whole_numbers import WholeNumber
from snapkv_lab.cli.lm_eval import lm_eval
from snapkv_lab.cli.workers import WorkerOptions, answering
from snapkv_lab.evaluate.sample import Setting, Template
from snapkv_lab.evaluate.task import Task
from snapkv_lab.evaluate.tasks import TASKS

_SETTINGS: dict[str, tuple[Setting, ...]] = {
    "visible": ("visible",),
    "hidden": ("hidden",),
    "both": ("visible", "hidden"),
}


@dataclass(frozen=True, kw_only=True)
class EvalOptions(SweepOptions, ReadingOptions, WorkerOptions, WritingOptions):
    """What every task takes."""

    setting: Annotated[
        Literal["visible", "hidden", "both"],
        panels.sweep(help="The question is visible to the vote, hidden from it, or both"),
    ] = "visible"
    turns: Annotated[
        list[str] | None,
        panels.sweep(
            help="What later questions do: append behind what was kept, compress it anew, or "
            "recall what was dropped (recall-pages:8: and attend to 8 pages of 16 dropped tokens "
            "at every step); again or with commas for more",
            show_default="append",
        ),
    ] = None
    template: Annotated[
        Template,
        panels.sweep(
            help="tokenizer: the model's chat template where it has one; none: the bare text; "
            "longbench: as the paper's LongBench run"
        ),
    ] = "tokenizer"
    limit: Annotated[int | None, panels.sweep(help="Samples of every cell"), WholeNumber(1)] = None
    reference_loss: Annotated[
        bool,
        panels.sweep(
            "--reference-loss",
            help="Say the loss of the right answer too: nats per token behind what was kept",
        ),
    ] = False
    results: Annotated[
        str | None,
        panels.output(
            help="Folder of the answers; a run that was stopped is continued there",
            show_default="snapkv-results/TASK-MODEL-HASH",
        ),
        RESULTS,
    ] = None
    plot: Annotated[
        str | None,
        panels.output(help="Write the figure: .png, .svg or .pdf"),
        Output(beside=("-budgets", "-loss")),
    ] = None
    report: Annotated[
        str | None,
        panels.output(help="Folder for a page with tables and figures"),
        Output(files=("index.html", "results.csv", "results.md")),
    ] = None


def _evaluate(*, settings: Task, options: EvalOptions) -> None:
    from snapkv.cli.grid import give  # torch and the model come with what follows
    from snapkv.cli.progress import answers_progress
    from snapkv_lab.cli.sweep import compared_methods, with_turns
    from snapkv_lab.cli.tables import results_table
    from snapkv_lab.drawing import require_drawable
    from snapkv_lab.evaluate.runner import Run
    from snapkv_lab.report import figures, page

    if options.plot is not None:
        require_drawable(options.plot)
    if options.report is not None:
        page.require_reportable()
    compared = with_turns(compared_methods(options), options.turns)
    with answering(options) as (loaded, who):
        run = Run(
            loaded=loaded,
            task=settings,
            methods=compared,
            questions=_SETTINGS[options.setting],
            template=options.template,
            limit=options.limit,
            reference_loss=options.reference_loss,
        )
        folder = results_folder(options.results, settings.name, loaded.name, run.fingerprint())
        with answers_progress(settings.name) as advance:
            results = run.into(folder, advance, who)
    found = {"run": results.run, "folder": str(folder), "rows": results.rows}
    give(
        found | {"warnings": results.task.warnings},
        lambda: results_table(results),
        as_json=options.json,
        place=f"answers: {folder}",
    )
    if results.unwritten is not None:  # behind what took so long
        raise results.unwritten
    if options.plot is not None:
        for path in figures.save(figures.draw(results), options.plot):
            typer.echo(f"figure: {path}", err=True)
    if options.report is not None:
        typer.echo(f"page: {page.write_report(results, options.report)}", err=True)


app = typer.Typer(
    name="eval",
    help="Compare methods on a task: needles, RULER, LongBench, retrieval, turns, lm-eval.",
    no_args_is_help=True,
)
for _kind in TASKS.values():
    _command = with_options(EvalOptions, settings=_kind, panel="Task")(_evaluate)
    app.command(name=_kind.name)(_command)
app.command(name="lm-eval")(lm_eval)
