"""`snapkv eval TASK`: the paper's experiments, every method in one run."""

import json as json_format
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from snapkv.cli.fields import field_options, from_options
from snapkv.cli.lm_eval import lm_eval
from snapkv.cli.options import SweepOptions, with_options
from snapkv.cli.outputs import RESULTS, Output, WritingOptions, results_folder
from snapkv.lab.evaluate.sample import Setting, Template
from snapkv.lab.evaluate.tasks import TASKS
from snapkv.validation import require_at_least

if TYPE_CHECKING:
    from snapkv.lab.evaluate.runner import Results
    from snapkv.lab.evaluate.task import Task

_QUESTIONS: dict[str, tuple[Setting, ...]] = {
    "visible": ("visible",),
    "hidden": ("hidden",),
    "both": ("visible", "hidden"),
}

_sweep = "What to compare"
_output = "Output"


@dataclass(frozen=True, kw_only=True)
class EvalOptions(SweepOptions, WritingOptions):
    """What every task takes."""

    question: Annotated[
        Literal["visible", "hidden", "both"],
        typer.Option(help="visible to the vote, hidden from it, or both", rich_help_panel=_sweep),
    ] = "visible"
    template: Annotated[
        Template,
        typer.Option(
            help="tokenizer: the model's chat template where it has one; none: the bare text; "
            "longbench: as the paper's LongBench run",
            rich_help_panel=_sweep,
        ),
    ] = "tokenizer"
    limit: Annotated[
        int | None, typer.Option(help="Samples of every cell", rich_help_panel=_sweep)
    ] = None
    output: Annotated[
        str | None,
        typer.Option(
            help="Folder of the answers; a run that was stopped is continued there",
            rich_help_panel=_output,
            show_default="snapkv-results/TASK-MODEL-HASH",
        ),
        RESULTS,
    ] = None
    plot: Annotated[
        str | None,
        typer.Option(help="Write the figure: .png, .svg or .pdf", rich_help_panel=_output),
        Output(beside=("-budgets",)),
    ] = None
    report: Annotated[
        str | None,
        typer.Option(help="Folder for a page with tables and figures", rich_help_panel=_output),
        Output(files=("index.html", "results.csv", "results.md")),
    ] = None

    def __post_init__(self) -> None:
        """Check the limit, too."""
        super().__post_init__()
        if self.limit is not None:
            require_at_least("limit", self.limit, 1)


app = typer.Typer(name="eval", help="Run an experiment of the paper.", no_args_is_help=True)


def _command(kind: type["Task"]) -> Callable[..., None]:
    """The command that runs a task of that kind."""

    def command(*, options: EvalOptions, **settings: Any) -> None:
        _evaluate(from_options(kind, settings), options)

    parameters = field_options(kind, panel="Task")
    own = Parameter("options", Parameter.KEYWORD_ONLY, annotation=EvalOptions)
    vars(command)["__signature__"] = Signature([*parameters, own])
    command.__doc__ = (kind.__doc__ or "").partition("\n")[0]
    return with_options(EvalOptions)(command)


for _kind in TASKS.values():
    app.command(name=_kind.name)(_command(_kind))
app.command(name="lm-eval")(lm_eval)


def _evaluate(task: "Task", options: EvalOptions) -> None:
    from rich.console import Console  # torch and the model come with what follows

    from snapkv.cli.loading import load_model
    from snapkv.cli.progress import AnswersProgress
    from snapkv.cli.sweep import compared_methods
    from snapkv.lab.drawing import require_drawable
    from snapkv.lab.evaluate.runner import Run
    from snapkv.lab.report import figures, page

    if options.plot is not None:
        require_drawable(options.plot)
    if options.report is not None:
        page.require_reportable()
    compared = compared_methods(options)
    console = Console(stderr=True)
    loaded = load_model(options, console)
    run = Run(
        loaded=loaded,
        task=task,
        methods=compared,
        questions=_QUESTIONS[options.question],
        template=options.template,
        limit=options.limit,
    )
    with AnswersProgress(console, task.name) as progress:
        folder = results_folder(options.output, task.name, loaded.name, run.fingerprint())
        results = run.into(folder, progress.advance)
    _show(results, options)  # first: what took so long is not lost with a file
    if results.unwritten is not None:
        raise results.unwritten
    if options.plot is not None:
        for path in figures.save(figures.draw(results), options.plot):
            typer.echo(f"figure: {path}", err=True)
    if options.report is not None:
        typer.echo(f"page: {page.write_report(results, options.report)}", err=True)


def _show(results: "Results", options: EvalOptions) -> None:
    from snapkv.cli.grid import show
    from snapkv.cli.tables import results_table

    if options.json:
        found = {
            "run": results.run,
            "folder": str(results.folder),
            "rows": results.rows,
            "warnings": results.task.warnings,
        }
        typer.echo(json_format.dumps(found, indent=2))
    else:
        show(results_table(results))
        typer.echo(f"answers: {results.folder}", err=True)
