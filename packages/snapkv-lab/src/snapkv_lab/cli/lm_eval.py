"""`snapkv eval lm-eval`: any task of lm-eval, from compressed caches."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from snapkv.cli import panels
from snapkv.cli.options import SweepOptions, with_options
from snapkv.cli.outputs import RESULTS, results_folder
from snapkv.cli.whole_numbers import WholeNumber
from snapkv.errors import InvalidArgumentError, MissingDependencyError, install_command


@dataclass(frozen=True, kw_only=True)
class LmEvalOptions(SweepOptions):
    """What the bridge takes."""

    tasks: Annotated[
        str, panels.task(help="Names of lm-eval's tasks, groups or tags, with commas")
    ] = ""
    include_path: Annotated[str | None, panels.task(help="Folder of your own task files")] = None
    num_fewshot: Annotated[
        int | None,
        panels.task(help="Examples before every question", show_default="what a task says"),
        WholeNumber(0),
    ] = None
    template: Annotated[
        Literal["tokenizer", "none"],
        panels.task(help="tokenizer: the model's chat template; none: the bare text"),
    ] = "none"
    limit: Annotated[int | None, panels.task(help="Samples of every task"), WholeNumber(1)] = None
    batch_size: Annotated[
        int,
        panels.task(
            help="Prompts answered together, and continuations of one context scored together"
        ),
        WholeNumber(1),
    ] = 1
    results: Annotated[
        str | None,
        panels.output(
            help="Folder of the answers; a run that was stopped is continued there",
            show_default="snapkv-results/lm-eval-MODEL-HASH",
        ),
        RESULTS,
    ] = None


@with_options(LmEvalOptions)
def lm_eval(*, options: LmEvalOptions) -> None:
    """Any task of lm-eval, from the cache of every method."""
    tasks = [name.strip() for name in options.tasks.split(",") if name.strip()]
    _require(tasks, options)

    from snapkv.cli.grid import give  # torch and the model come with what follows
    from snapkv.cli.loading import load_model
    from snapkv.cli.progress import answers_progress
    from snapkv_lab.cli.sweep import compared_methods
    from snapkv_lab.cli.tables import metrics_table
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
        rows, unwritten = run.into(folder, advance)
    give(
        {"run": run.description(), "folder": str(folder), "rows": rows},
        lambda: metrics_table("lm-eval", rows),
        as_json=options.json,
        place=f"answers: {folder}",
    )
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
