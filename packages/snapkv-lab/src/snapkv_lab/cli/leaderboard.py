"""`snapkv leaderboard`: methods, shares of the cache and tasks on one model, in one command."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from snapkv.cli import panels
from snapkv.cli.amounts import EXACT, WholeNumber, shares, storage_bits
from snapkv.cli.fields import with_options
from snapkv.cli.options import StorageBits
from snapkv.cli.outputs import RunFolder, results_folder
from snapkv_lab.cli.workers import SettingWord, WorkerOptions, answering
from snapkv_lab.evaluate.sample import SETTINGS, Setting, Template

if TYPE_CHECKING:
    from snapkv.app.models import LoadedModel
    from snapkv_lab.evaluate.leaderboard import Place
    from snapkv_lab.evaluate.runner import Run
    from snapkv_lab.evaluate.task import Task

EXAMPLES = {
    "leaderboard": ("snapkv leaderboard --methods snapkv,tova --ratios 4:1 --length 1k",),
}

_RECORD = "leaderboard.json"


@dataclass(frozen=True, kw_only=True)
class LeaderboardOptions(WorkerOptions):
    """What takes part, and what is asked."""

    tasks: Annotated[str, panels.sweep(help="Tasks of eval whose length is set, with commas")] = (
        "needle,instructions"
    )
    methods: Annotated[
        list[str] | None,
        panels.sweep(
            help="With parameters: snapkv:kernel_size=13; again or with commas for more",
            show_default="all that have a budget",
        ),
    ] = None
    ratios: Annotated[
        str,
        panels.sweep(
            help="Shares of the full cache's bytes where the question is visible: 0.25 or 4:1, "
            "with commas"
        ),
    ] = "0.5,0.25,0.125"
    hidden_ratios: Annotated[
        str, panels.sweep(help="The same where the question is hidden, with commas")
    ] = "8:1,16:1,32:1"
    bits: StorageBits = EXACT
    setting: SettingWord = "both"
    length: Annotated[int, panels.sweep(help="Tokens of a prompt, about"), WholeNumber(1)] = 2048
    limit: Annotated[int, panels.sweep(help="Samples of every cell"), WholeNumber(1)] = 2
    template: Annotated[
        Template,
        panels.sweep(help="tokenizer: the model's chat template where it has one; none: bare text"),
    ] = "none"
    results: Annotated[
        str | None,
        panels.output(
            help="Folder of answers and page; what was stopped is continued there",
            show_default="snapkv-results/leaderboard-MODEL-HASH",
        ),
        RunFolder(
            files=(
                *(_RECORD, "leaderboard.md", "leaderboard.html"),
                *("leaderboard.svg", "leaderboard-time.svg"),
            ),
            record=_RECORD,
            key="leaderboard",
        ),
    ] = None
    json: panels.AsJson = False

    def __post_init__(self) -> None:
        _ = self.shares
        storage_bits(self.bits)

    @property
    def shares(self) -> dict[Setting, tuple[float, ...]]:
        """What is kept, by setting, for the settings that are asked for."""
        found: dict[Setting, tuple[float, ...]] = {
            "visible": shares("ratios", self.ratios),
            "hidden": shares("hidden_ratios", self.hidden_ratios),
        }
        return {setting: found[setting] for setting in SETTINGS[self.setting]}


@with_options(LeaderboardOptions)
def leaderboard(*, options: LeaderboardOptions) -> None:
    """Compare methods at several shares of the cache on one model: scores, intervals, one page."""
    from snapkv.cli.loading import answers_progress
    from snapkv_lab.cli.methods import contending  # torch and the model come with what follows
    from snapkv_lab.cli.tables import present
    from snapkv_lab.evaluate.leaderboard import board, estimate, task_of_one_length
    from snapkv_lab.evaluate.store import short_hash
    from snapkv_lab.report.leaderboard import board_lines, board_table, write_board
    from snapkv_lab.report.page import require_reportable

    require_reportable()
    tasks = [
        task_of_one_length(name, options.length, options.limit)
        for name in dict.fromkeys(part.strip() for part in options.tasks.split(","))
    ]
    named = contending(options.methods or [])
    with answering(options) as (loaded, who):
        runs, left_out = _runs(loaded, tasks, named, options)
        settings = short_hash({"/".join(place): run.fingerprint() for place, run in runs.items()})
        folder = results_folder(options.results, "leaderboard", loaded.name, settings)
        for place, lines in left_out.items():
            for line in lines:
                typer.echo(f"notice: {'/'.join(place)} leaves out {line}", err=True)
        typer.echo(estimate(runs, folder, timed=options.is_here), err=True)
        with answers_progress("leaderboard") as advance:
            found, unwritten = board(runs, folder, left_out, advance, who)
    present(
        found,
        lambda: board_table(found, board_lines(found), by_task=False),
        as_json=options.json,
        place=f"answers: {folder}",
    )
    typer.echo(f"page: {write_board(found, folder)}", err=True)
    if unwritten is not None:  # behind what took so long
        raise unwritten


def _runs(
    loaded: "LoadedModel", tasks: list["Task"], named: list[str], options: LeaderboardOptions
) -> tuple[dict["Place", "Run"], dict["Place", list[str]]]:
    """A run per task and setting, and which methods each leaves out."""
    from snapkv_lab.cli.methods import contenders, storages
    from snapkv_lab.evaluate.leaderboard import prompt_tokens
    from snapkv_lab.evaluate.runner import Run

    runs: dict[Place, Run] = {}
    left_out: dict[Place, list[str]] = {}
    for task in tasks:
        tokens = prompt_tokens(loaded, task, options.template)
        for setting, kept in options.shares.items():
            found = contenders(loaded, named, kept, tokens, setting, storages(options.bits))
            place = (task.name, setting)
            runs[place] = Run(
                loaded=loaded,
                task=task,
                methods=found.methods,
                questions=(setting,),
                template=options.template,
            )
            left_out[place] = found.left_out
    return runs, left_out
