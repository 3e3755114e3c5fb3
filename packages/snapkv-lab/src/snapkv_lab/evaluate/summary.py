"""Summaries of a run: from answers to a row per method and cell, and from rows to lines of
tables.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from snapkv_lab.evaluate.intervals import (
    BY_SAMPLE,
    Interval,
    Measure,
    cell_differences,
    mean_interval,
    sample_cell,
)
from snapkv_lab.evaluate.store import Key, record_key
from snapkv_lab.evaluate.task import Task
from snapkv_lab.rows import Row, group_rows, mean_value

_MEANS = ("prompt_tokens", "kept_tokens", "held_bytes", "full_bytes")
_MEDIANS = ("token_ms", "first_token_ms")


def summarise(records: Iterable[Row], keys: Iterable[Key], task: Task) -> list[Row]:
    """Summarise the records: one row per method, setting and cell, in the order of the keys.

    A row holds: task, metric, method, question, cell, policy; status ("ok" if any sample was
    answered, else the status of the first); samples (how many were answered); compressed (how many
    of their prompts lost tokens); failed (counts by reason); score (the mean from 0 to 1, or None);
    interval (of the mean; None for a single sample); difference (from the full cache; None if it
    did not run); prompt_tokens, kept_tokens, held_bytes and full_bytes (means); token_ms and
    first_token_ms (medians); scores (by sample); and for turns conversations (by sample, the name
    of its conversation). If the loss of the references was measured, it also holds loss (the mean
    in nats per token, or None), loss_interval, loss_difference and losses.

    Args:
        records: the records of the run.
        keys: the keys of the wanted answers, in order; keys without a record are skipped.
        task: the task that was run.
    """
    by_key = {record_key(record): record for record in records}
    ordered = [by_key[wanted] for wanted in keys if wanted in by_key]
    groups = group_rows(
        ordered, lambda each: json.dumps([each["method"], each["question"], each["cell"]])
    )
    rows = [_row(group, task) for group in groups.values()]
    for row, difference in zip(rows, cell_differences(rows), strict=True):
        row["difference"] = difference
    if any("loss" in record for record in ordered):
        for row, group in zip(rows, groups.values(), strict=True):
            row |= _measured(group, "loss")
        for row, difference in zip(rows, cell_differences(rows, "loss"), strict=True):
            row["loss_difference"] = difference
    return rows


def _row(records: list[Row], task: Task) -> Row:
    """Return the row of one method, setting and cell, without differences and loss.

    Args:
        records: the records of its samples, answered or not, at least one.
        task: the task that was run.
    """
    answered = [record for record in records if record["status"] == "ok"]
    failed = [record["status"] for record in records if record["status"] != "ok"]
    spoken = {each["sample"]: each.get("conversation") for each in answered}
    return {
        "task": task.name,
        "metric": task.metric,
        **{name: records[0][name] for name in ("method", "question", "cell", "policy")},
        "status": "ok" if answered else failed[0],
        "samples": len(answered),
        "compressed": sum(each["kept_tokens"] < each["prompt_tokens"] for each in answered),
        "failed": {reason: failed.count(reason) for reason in sorted(set(failed))},
        **_measured(answered, "score"),
        **{name: mean_value(answered, name) for name in _MEANS},
        **{name: mean_value(answered, name, median) for name in _MEDIANS},
        **({"conversations": spoken} if spoken and all(spoken.values()) else {}),
    }


def _measured(records: Iterable[Row], of: Measure) -> Row:
    """Return three fields of a row: the mean of the scores or losses, its confidence interval, and
    the values by sample.

    Args:
        records: the records of one cell; those without a value are left out.
        of: "score", for the keys "score", "interval" and "scores"; or "loss", for "loss",
            "loss_interval" and "losses".

    Returns:
        A new dictionary. The mean is None without values, and the interval with fewer than two.
    """
    values = {each["sample"]: each[of] for each in records if each.get(of) is not None}
    interval = mean_interval([[(list(values.values()), None)]])
    return {
        of: fmean(values.values()) if values else None,
        "interval" if of == "score" else f"{of}_interval": interval and list(interval),
        BY_SAMPLE[of]: values,
    }


@dataclass(frozen=True, kw_only=True)
class ScoreLine:
    """One line of a table, with the scores and the costs of a method.

    Columns without an answer are in `reasons` and not in `scores`. An interval is None if its
    column has one sample only, and `intervals` is empty if single answers are not known. `mean` and
    `loss` are means over the columns that have a value, as papers average over data sets.
    """

    method: str
    question: str
    scores: dict[Any, float]
    intervals: dict[Any, Interval | None]
    interval: Interval | None = None
    reasons: dict[Any, str]
    held_bytes: float | None = None
    token_ms: float | None = None
    loss: float | None = None
    loss_interval: Interval | None = None

    @property
    def mean(self) -> float | None:
        return fmean(self.scores.values()) if self.scores else None


def score_lines(rows: Sequence[Row], axis: str) -> list[ScoreLine]:
    """Return one line of a table per method and question, in the order of the rows. The score of a
    column is the mean over its cells.

    Args:
        rows: the rows of `summarise`.
        axis: the key of the cells whose values are the columns.
    """
    lines = group_rows(rows, lambda row: (row["method"], row["question"]))
    return [_score_line(of_line, axis) for of_line in lines.values()]


def _score_line(rows: list[Row], axis: str) -> ScoreLine:
    """Return the line of a table from the rows of one method and question.

    Args:
        rows: the rows, at least one.
        axis: the key of the cells whose values are the columns of the table.
    """
    columns = group_rows(rows, lambda row: row["cell"][axis])
    scored = {
        value: [sample_cell(row, "score") for row in of_column if row.get("scores")]
        for value, of_column in columns.items()
    }
    means = {value: mean_value(of_column, "score") for value, of_column in columns.items()}
    answered = {value: scored[value] for value, mean in means.items() if mean is not None}
    lost = [
        [sample_cell(row, "loss") for row in of_column if row.get("losses")]
        for of_column in columns.values()
    ]
    lost = [cells for cells in lost if cells]
    return ScoreLine(
        method=rows[0]["method"],
        question=rows[0]["question"],
        scores={value: mean for value, mean in means.items() if mean is not None},
        intervals={value: mean_interval([cells]) for value, cells in answered.items()},
        interval=mean_interval(answered.values()),
        reasons={value: columns[value][0]["status"] for value in means if means[value] is None},
        held_bytes=mean_value(rows, "held_bytes"),
        token_ms=mean_value(rows, "token_ms"),
        loss=fmean(fmean(fmean(cell) for cell, _ in cells) for cells in lost) if lost else None,
        loss_interval=mean_interval(lost),
    )


def axis_values(rows: Iterable[Row], axis: str) -> list[Any]:
    return list(dict.fromkeys(row["cell"][axis] for row in rows))
