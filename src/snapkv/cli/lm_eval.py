"""`snapkv eval lm-eval`: any task of lm-eval, from compressed caches."""

import importlib.util
import json as json_format
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from snapkv.cli.options import SweepOptions, with_options
from snapkv.cli.outputs import RESULTS, results_folder
from snapkv.errors import InvalidArgumentError, MissingDependencyError, install_command
from snapkv.validation import require_at_least


@dataclass(frozen=True, kw_only=True)
class LmEvalOptions(SweepOptions):
    """What the bridge takes."""

    tasks: Annotated[
        str,
        typer.Option(
            help="Names of lm-eval's tasks, groups or tags, with commas", rich_help_panel="Task"
        ),
    ] = ""
    include_path: Annotated[
        str | None, typer.Option(help="Folder of your own task files", rich_help_panel="Task")
    ] = None
    num_fewshot: Annotated[
        int | None,
        typer.Option(
            help="Examples before every question",
            show_default="what a task says",
            rich_help_panel="Task",
        ),
    ] = None
    template: Annotated[
        Literal["tokenizer", "none"],
        typer.Option(
            help="tokenizer: the model's chat template; none: the bare text",
            rich_help_panel="Task",
        ),
    ] = "none"
    limit: Annotated[
        int | None, typer.Option(help="Samples of every task", rich_help_panel="Task")
    ] = None
    output: Annotated[
        str | None,
        typer.Option(
            help="Folder of the answers; a run that was stopped is continued there",
            rich_help_panel="Output",
            show_default="snapkv-results/lm-eval-MODEL-HASH",
        ),
        RESULTS,
    ] = None


@with_options(LmEvalOptions)
def lm_eval(*, options: LmEvalOptions) -> None:
    """Any task of lm-eval, from the cache of every method."""
    tasks = [name.strip() for name in options.tasks.split(",") if name.strip()]
    _require(tasks, options)
    from rich.console import Console  # torch and the model come with what follows

    from snapkv.cli.grid import show
    from snapkv.cli.loading import load_model
    from snapkv.cli.progress import AnswersProgress
    from snapkv.cli.sweep import compared_methods
    from snapkv.cli.tables import metrics_table
    from snapkv.lab.evaluate.harness import HarnessRun

    compared = compared_methods(options)
    console = Console(stderr=True)
    loaded = load_model(options, console)
    run = HarnessRun(
        loaded=loaded,
        tasks=tasks,
        methods=compared,
        include_path=Path(options.include_path) if options.include_path else None,
        num_fewshot=options.num_fewshot,
        chat=options.template == "tokenizer",
        limit=options.limit,
    )
    with AnswersProgress(console, "lm-eval") as progress:
        folder = results_folder(options.output, "lm-eval", loaded.name, run.fingerprint())
        rows, unwritten = run.into(folder, progress.advance)
    if options.json:
        found = {"run": run.description(), "folder": str(folder), "rows": rows}
        typer.echo(json_format.dumps(found, indent=2))
    else:
        show(metrics_table("lm-eval", rows))
        typer.echo(f"answers: {folder}", err=True)
    if unwritten is not None:  # behind what took so long
        raise unwritten


def _require(tasks: list[str], options: LmEvalOptions) -> None:
    """Check what can be checked before anything is loaded."""
    for package in ("lm_eval", "datasets"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(
                f"lm-eval: expected lm-eval with what it needs, got no package {package}; run "
                f"{install_command('lm-eval')}"
            )
    if not tasks:
        raise InvalidArgumentError(
            "tasks: expected names of lm-eval's tasks with commas between them, got none; write "
            "for instance --tasks squadv2,triviaqa"
        )
    if options.include_path is not None and not Path(options.include_path).is_dir():
        raise InvalidArgumentError(
            f"include_path: expected a folder of task files, got {options.include_path!r}"
        )
    for name, least in (("num_fewshot", 0), ("limit", 1)):
        value = getattr(options, name)
        if value is not None:
            require_at_least(name, value, least)
