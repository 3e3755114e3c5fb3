"""Every method at every share of the cache on several tasks, as one set of rows."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any

from snapkv.app.answering import answer
from snapkv.app.models import LoadedModel
from snapkv.errors import InvalidArgumentError, OutputError
from snapkv.policies import FullCache
from snapkv.storage.coded import KVCodes
from snapkv.validation import nearest
from snapkv_lab.evaluate.runner import Results, Run
from snapkv_lab.evaluate.sample import Template
from snapkv_lab.evaluate.store import Progress, Record, answered
from snapkv_lab.evaluate.task import Task
from snapkv_lab.evaluate.tasks import TASKS
from snapkv_lab.evaluate.workers.base import Executor
from snapkv_lab.measure.environment import versions

COUNTED_BY = ("samples_each", "permutations")
"""Settings of tasks that say how many samples a cell has."""

Place = tuple[str, str]
"""A task and a setting of its question."""


def task_of_one_length(name: str, length: int, samples: int) -> Task:
    """A task with prompts of one length, so that a share of the cache is one budget for all.

    Where it has the setting, answers are begun for the model, since what is compared is caches and
    not how models follow instructions.
    """
    known = {task: kind for task, kind in TASKS.items() if _settings(kind) >= {"lengths"}}
    if name not in known:
        raise InvalidArgumentError(
            f"tasks: expected tasks whose length is set, of {', '.join(known)}, got "
            f"{name!r}{nearest(name, known)}; choose some of them"
        )
    kind = known[name]
    given: dict[str, Any] = {"lengths": (length,), "cloze": True}
    given |= dict.fromkeys(COUNTED_BY, samples)
    return kind(**{key: value for key, value in given.items() if key in _settings(kind)})


def _settings(kind: type[Task]) -> set[str]:
    return {field.name for field in fields(kind)}


def prompt_tokens(loaded: LoadedModel, task: Task, template: Template) -> float:
    prompts = (
        sample.prompt(loaded.tokenizer, template, "visible")
        for sample in task.for_model(loaded.name, loaded.max_tokens).samples(loaded.tokenizer)
    )
    return fmean(prompt.token_ids(loaded.tokenizer).shape[1] for prompt in prompts)


def estimate(runs: Mapping[Place, Run], folder: Path, *, timed: bool = True) -> str:
    """How many answers are to be given, and how long the full cache would take, in words.

    It is timed at each task's first prompt; many methods take longer.
    """
    seconds, left, known = 0.0, 0, 0
    took: dict[str, tuple[float, float]] = {}
    for place, run in runs.items():
        there = answered(folder.joinpath(*place))
        wanted = set(run.keys())
        missing = len(wanted - there)
        known, left = known + len(wanted & there), left + missing
        if missing and timed:
            if place[0] not in took:
                took[place[0]] = _timed(run)
            reading, generating = took[place[0]]
            seconds += missing / len(run.methods) * reading + missing * generating
    if not left:
        return f"{known:,} answers are there, none is to be given"
    answers = f"{left:,} answers to give{f', {known:,} are there' if known else ''}"
    return f"about {max(1, round(seconds / 60)):,} min or more: {answers}" if timed else answers


def _timed(run: Run) -> tuple[float, float]:
    """Seconds that the full cache takes to read a first prompt, and to generate an answer."""
    sample = next(run.task.samples(run.loaded.tokenizer))
    prompt = sample.prompt(run.loaded.tokenizer, run.template, "visible")
    given = answer(run.loaded, prompt, FullCache(), sample.settings)
    return given.first_token_ms / 1000, (given.total_ms - given.first_token_ms) / 1000


def board(
    runs: Mapping[Place, Run],
    folder: Path,
    left_out: Mapping[Place, Sequence[str]],
    on_progress: Progress | None = None,
    executor: Executor | None = None,
) -> tuple[Record, OutputError | None]:
    """Answer what the folder does not hold yet, and gather the rows of all runs.

    Returns:
        The record, and why one of the runs has no summary in its folder, or None where all have.
        The record holds leaderboard (versions), model, runs (what each was, by ``TASK/SETTING``),
        left_out (the same) and rows: those of `summarise` with "task" in their cell, with "share",
        what was to be held of the full cache's bytes, None for the full cache, and with "bits" in a
        word, None for as it came.
    """
    found: dict[str, Results] = {
        "/".join(place): run.into(folder.joinpath(*place), on_progress, executor)
        for place, run in runs.items()
    }
    first = next(iter(found.values()))
    unwritten = [results.unwritten for results in found.values() if results.unwritten is not None]
    record = {
        "leaderboard": versions(),
        "model": first.run["model"],
        "runs": {place: results.run for place, results in found.items()},
        "left_out": {"/".join(place): list(lines) for place, lines in left_out.items() if lines},
        "rows": [board_row(row) for results in found.values() for row in results.rows],
    }
    return record, next(iter(unwritten), None)


def board_row(row: Record) -> Record:
    """A row of `summarise` as a leaderboard has it, see `board`."""
    name, _, share = row["method"].rpartition("@")
    bits = row["policy"].get("bits")
    return row | {
        "cell": {"task": row["task"], **row["cell"]},
        "share": float(share) if name else None,
        "bits": None if bits is None else str(KVCodes.of(bits)),
    }
