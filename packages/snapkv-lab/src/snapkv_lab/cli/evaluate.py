"""`snapkv eval TASK`: the paper's experiments and lm-eval's tasks, with all methods in one run."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from snapkv.errors import MissingDependencyError, install_command, wrong
from snapkv_app.cli import panels
from snapkv_app.cli.amounts import WholeNumber
from snapkv_app.cli.fields import with_options
from snapkv_app.cli.options import ReadingOptions, SweepOptions
from snapkv_app.cli.outputs import RESULTS, Output, WritingOptions, results_folder
from snapkv_lab.cli.workers import SettingWord, WorkerOptions, open_executor, results_option
from snapkv_lab.evaluate.sample import SETTINGS, Template
from snapkv_lab.evaluate.task import Task
from snapkv_lab.evaluate.tasks import TASKS

EXAMPLES = {
    "eval": ("snapkv eval needle --lengths 1k,4k --policy snapkv,tova --budget 256,1k",),
    "eval needle": (
        "snapkv eval needle --lengths 1k,4k --policy snapkv,tova --budget 256,1k",
        "snapkv eval needle --setting both --report needle-page",
    ),
    "eval lines": ("snapkv eval lines --lengths 2k --samples-each 4 --plot lines.svg",),
    "eval instructions": ("snapkv eval instructions --lengths 2k --protect-instructions",),
    "eval turns": ("snapkv eval turns --turns append,recall --cloze --template none",),
    "eval longbench": ("snapkv eval longbench --datasets qasper --limit 5 --budget 1k",),
    "eval ruler": ("snapkv eval ruler --tasks niah_single_2,vt --lengths 4k --limit 5",),
    "eval rag-citation": ("snapkv eval rag-citation --corpus squad --documents 5,10",),
    "eval rag-position": ("snapkv eval rag-position --corpus squad --documents 10",),
    "eval rag-pipeline": ("snapkv eval rag-pipeline --corpus squad --documents 5,10",),
    "eval lm-eval": ("snapkv eval lm-eval --tasks squadv2 --limit 20 --budget 512",),
}


@dataclass(frozen=True, kw_only=True)
class EvalOptions(SweepOptions, ReadingOptions, WorkerOptions, WritingOptions):
    """The command-line options that all tasks have."""

    setting: SettingWord = "visible"
    turns: Annotated[
        list[str] | None,
        panels.sweep(
            help="How later questions are read: append to the kept tokens, compress again, or "
            "recall evicted tokens; again or with commas for more",
            show_default="append",
        ),
    ] = None
    template: Annotated[
        Template,
        panels.sweep(
            help="tokenizer: the model's chat template, if any; none: plain text; "
            "longbench: as in the paper's LongBench run"
        ),
    ] = "tokenizer"
    limit: Annotated[int | None, panels.sweep(help="Samples per cell"), WholeNumber(1)] = None
    reference_loss: Annotated[
        bool,
        panels.sweep(
            "--reference-loss",
            help="Also report the loss of the right answer in the compressed cache, nats per token",
        ),
    ] = False
    results: Annotated[str | None, results_option("TASK"), RESULTS] = None
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


# Without a docstring, so that the help of each command is the first line of its task.
def _evaluate(*, settings: Task, options: EvalOptions) -> None:
    from snapkv_app.cli.loading import answers_progress  # imports torch
    from snapkv_lab.cli.methods import combine_with_turns, compared_methods
    from snapkv_lab.cli.tables import print_summary
    from snapkv_lab.drawing import require_drawable
    from snapkv_lab.evaluate.runner import Run
    from snapkv_lab.report import figures, page

    if options.plot is not None:
        require_drawable(options.plot)
    if options.report is not None:
        page.require_reportable()
    compared = combine_with_turns(compared_methods(options), options.turns)
    with open_executor(options) as (loaded, who):
        run = Run(
            loaded=loaded,
            task=settings,
            methods=compared,
            questions=SETTINGS[options.setting],
            template=options.template,
            limit=options.limit,
            reference_loss=options.reference_loss,
        )
        folder = results_folder(options.results, settings.name, loaded.name, run.fingerprint())
        with answers_progress(settings.name) as advance:
            results = run.evaluate(folder, advance, who)
    print_summary(
        results,
        lambda: page.method_table(results),
        as_json=options.json,
        place=f"answers: {folder}",
        warnings=results.task.warnings,
    )
    if options.plot is not None:
        for path in figures.save_figures(figures.draw(results), options.plot):
            typer.echo(f"figure: {path}", err=True)
    if options.report is not None:
        typer.echo(f"page: {page.write_report(results, options.report)}", err=True)


@dataclass(frozen=True, kw_only=True)
class LmEvalOptions(SweepOptions):
    """The command-line options for running tasks of lm-eval."""

    tasks: Annotated[
        str, panels.task(help="Names of lm-eval's tasks, groups or tags, with commas")
    ] = ""
    include_path: Annotated[str | None, panels.task(help="Folder of further task files")] = None
    num_fewshot: Annotated[
        int | None,
        panels.task(help="Examples before every question", show_default="the task's setting"),
        WholeNumber(0),
    ] = None
    template: Annotated[
        Literal["tokenizer", "none"],
        panels.task(help="tokenizer: the model's chat template; none: plain text"),
    ] = "none"
    limit: Annotated[int | None, panels.task(help="Samples per task"), WholeNumber(1)] = None
    batch_size: Annotated[
        int,
        panels.task(help="Batch size of prompts, and of continuations of one context"),
        WholeNumber(1),
    ] = 1
    results: Annotated[str | None, results_option("lm-eval"), RESULTS] = None


def _require_tasks(tasks: list[str], options: LmEvalOptions) -> None:
    """Check the options of `lm_eval` before torch is imported.

    Raises:
        InvalidArgumentError: no task is named, or the folder of tasks is missing.
        MissingDependencyError: lm-eval or a package that it needs is not installed.
    """
    for package in ("lm_eval", "datasets"):
        if importlib.util.find_spec(package) is None:
            remedy = f"Run {install_command('lm-eval')}"
            problem = f"the package {package} is not installed"
            raise wrong("lm-eval", problem, remedy, MissingDependencyError)
    if not tasks:
        problem = "expected the names of tasks of lm-eval separated by commas, but got none"
        raise wrong("tasks", problem, "For example, use --tasks squadv2,triviaqa")
    if options.include_path and not Path(options.include_path).is_dir():
        problem = f"expected a folder of task files, but got {options.include_path!r}"
        raise wrong("include_path", problem, "Use an existing folder")


@with_options(LmEvalOptions)
def lm_eval(*, options: LmEvalOptions) -> None:
    """Run any task of lm-eval with the cache of every method."""
    tasks = [name.strip() for name in options.tasks.split(",") if name.strip()]
    _require_tasks(tasks, options)

    from snapkv_app.cli.loading import answers_progress, load_model  # imports torch
    from snapkv_lab.cli.methods import compared_methods
    from snapkv_lab.cli.tables import metrics_table, print_summary
    from snapkv_lab.evaluate.harness import HarnessRun

    compared = compared_methods(options)
    loaded = load_model(options)
    run = HarnessRun(
        loaded=loaded,
        tasks=tasks,
        methods=compared,
        include_path=Path(options.include_path) if options.include_path else None,
        num_fewshot=options.num_fewshot,
        chat=options.template == "tokenizer",
        limit=options.limit,
        batch_size=options.batch_size,
    )
    with answers_progress("lm-eval") as advance:
        folder = results_folder(options.results, "lm-eval", loaded.name, run.fingerprint())
        summary = run.evaluate(folder, advance)
    print_summary(
        summary,
        lambda: metrics_table("lm-eval", summary.rows),
        as_json=options.json,
        place=f"answers: {folder}",
    )


app = typer.Typer(
    name="eval",
    help="Compare methods on a task: needles, RULER, LongBench, retrieval, turns, lm-eval.",
    no_args_is_help=True,
)
for _kind in TASKS.values():
    _command = with_options(EvalOptions, settings=_kind, panel="Task")(_evaluate)
    app.command(name=_kind.name)(_command)
app.command(name="lm-eval")(lm_eval)
