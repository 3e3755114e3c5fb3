"""From answers to rows, a mean per method and cell; and from rows to the lines of tables."""

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

from snapkv_lab.evaluate.intervals import (
    Cell,
    Interval,
    cell_differences,
    conversations_of,
    interval_of,
    mean_interval,
)
from snapkv_lab.evaluate.store import Key, Record, key
from snapkv_lab.evaluate.task import Task

_Group = TypeVar("_Group", bound=Hashable)


def summarise(records: Iterable[Record], keys: Iterable[Key], task: Task) -> list[Record]:
    """One row per method, setting and cell, in the order in which they are asked for.

    A row holds: task, metric, method, question, cell, policy; status ("ok" where any sample was
    answered, else the reason of the first), samples (answered), compressed (those of whose prompt
    anything was dropped), failed (by reason), score (mean, 0 to 1, None where none was answered),
    interval (of the mean, see `mean_interval`; None for a single sample), difference (from the full
    cache, see `Difference`; None where it did not run), prompt_tokens, kept_tokens, held_bytes and
    full_bytes (means), token_ms and first_token_ms (medians), scores (by sample), and for turns
    conversations (by sample, the one it is of). Where records have the loss of the references, it
    also holds loss (mean, nats per token, None where none is known), loss_interval, loss_difference
    and losses.
    """
    known = {key(record): record for record in records}
    found = [known[wanted] for wanted in keys if wanted in known]
    groups = _grouped(
        found, lambda each: json.dumps([each["method"], each["question"], each["cell"]])
    )
    rows = [_row(group, task) for group in groups.values()]
    for row, difference in zip(rows, cell_differences(rows), strict=True):
        row["difference"] = difference and difference.describe()
    if any("loss" in record for record in found):
        for row, group in zip(rows, groups.values(), strict=True):
            lost = {each["sample"]: each["loss"] for each in group if each.get("loss") is not None}
            interval = mean_interval([[list(lost.values())]])
            row["loss"] = fmean(lost.values()) if lost else None
            row["loss_interval"], row["losses"] = interval and list(interval), lost
        for row, difference in zip(rows, cell_differences(rows, "loss"), strict=True):
            row["loss_difference"] = difference and difference.describe("loss")
    return rows


def _row(records: list[Record], task: Task) -> Record:
    answered = [record for record in records if record["status"] == "ok"]
    failed = [record["status"] for record in records if record["status"] != "ok"]
    scores = {record["sample"]: record["score"] for record in answered}
    interval = mean_interval([[list(scores.values())]])
    spoken = {
        record["sample"]: record["conversation"] for record in answered if "conversation" in record
    }
    return {
        "task": task.name,
        "metric": task.metric,
        **{name: records[0][name] for name in ("method", "question", "cell", "policy")},
        "status": "ok" if answered else failed[0],
        "samples": len(answered),
        "compressed": sum(each["kept_tokens"] < each["prompt_tokens"] for each in answered),
        "failed": {reason: failed.count(reason) for reason in sorted(set(failed))},
        "score": mean_of(answered, "score"),
        "interval": interval and list(interval),
        **{
            name: mean_of(answered, name)
            for name in ("prompt_tokens", "kept_tokens", "held_bytes", "full_bytes")
        },
        **{name: mean_of(answered, name, median) for name in ("token_ms", "first_token_ms")},
        "scores": scores,
        **({"conversations": spoken} if spoken and len(spoken) == len(scores) else {}),
    }


class Scale(NamedTuple):
    """How numbers of a table are written: times what, and with how many digits."""

    times: int
    digits: int

    def text(self, number: float | None, sign: str = "") -> str:
        """A number, with its sign where that is "+"; a dash for none."""
        return "-" if number is None else f"{self.times * number:{sign}z.{self.digits}f}"


IN_PERCENT, IN_NATS = Scale(100, 1), Scale(1, 3)
"""How scores are written, and losses."""

ONE_SAMPLE = "one sample"
"""What stands where a score has no interval."""

NO_SPREAD = "no spread"
"""What stands where the samples of every cell are alike, so that the interval has no width."""


def shown_interval(interval: Sequence[float] | None, scale: Scale = IN_PERCENT) -> str:
    """An interval as text, or why there is none, or none that says anything."""
    if interval is None:
        return ONE_SAMPLE
    if interval[0] == interval[1]:
        return NO_SPREAD
    return f"{scale.text(interval[0])} to {scale.text(interval[1])}"


@dataclass(frozen=True, kw_only=True)
class ScoreLine:
    """A method in a table: its scores by column, and what it cost."""

    method: str
    question: str
    scores: dict[Any, float]
    intervals: dict[Any, Interval | None]
    interval: Interval | None
    reasons: dict[Any, str]
    held_bytes: float | None
    token_ms: float | None
    loss: float | None = None
    loss_interval: Interval | None = None

    @property
    def mean(self) -> float | None:
        """Over the columns that have a score, as papers average over data sets."""
        return fmean(self.scores.values()) if self.scores else None

    @property
    def shown_interval(self) -> str:
        """The interval of the mean as text, or why there is none; a dash without answers."""
        return shown_interval(self.interval) if self.intervals else "-"

    def shown(self, column: Any) -> str:
        """A column's score times 100 as text, or why there is none; "" where it was not asked."""
        if column in self.scores:
            return IN_PERCENT.text(self.scores[column])
        return self.reasons.get(column, "")


def score_lines(rows: Sequence[Record], axis: str) -> list[ScoreLine]:
    """A line per method and question, in the order of the rows; columns are the axis' values."""
    lines = _grouped(rows, lambda row: (row["method"], row["question"]))
    return [_score_line(of_line, axis) for of_line in lines.values()]


def axis_values(rows: Iterable[Record], axis: str) -> list[Any]:
    """The values of an axis, each once, in the order of the rows."""
    return list(dict.fromkeys(row["cell"][axis] for row in rows))


def _score_line(rows: list[Record], axis: str) -> ScoreLine:
    columns = _grouped(rows, lambda row: row["cell"][axis])
    means = {value: mean_of(of_column, "score") for value, of_column in columns.items()}
    answered = {
        value: _by_cell(columns[value], "scores") for value in means if means[value] is not None
    }
    lost = [part for of_column in columns.values() if (part := _by_cell(of_column, "losses"))]
    return ScoreLine(
        method=rows[0]["method"],
        question=rows[0]["question"],
        scores={value: mean for value, mean in means.items() if mean is not None},
        intervals={value: interval_of([cells]) for value, cells in answered.items()},
        interval=interval_of(answered.values()),
        reasons={value: columns[value][0]["status"] for value in means if means[value] is None},
        held_bytes=mean_of(rows, "held_bytes"),
        token_ms=mean_of(rows, "token_ms"),
        loss=fmean(fmean(fmean(cell) for cell, _ in cells) for cells in lost) if lost else None,
        loss_interval=interval_of(lost),
    )


def _by_cell(rows: Iterable[Record], name: str) -> list[Cell]:
    return [
        (list(row[name].values()), conversations_of(row, row[name]))
        for row in rows
        if row.get(name)
    ]


def _grouped(rows: Iterable[Record], by: Callable[[Record], _Group]) -> dict[_Group, list[Record]]:
    groups: dict[_Group, list[Record]] = {}
    for row in rows:
        groups.setdefault(by(row), []).append(row)
    return groups


def mean_of(rows: Sequence[Record], name: str, mean: Any = fmean) -> float | None:
    """The mean of a number over the rows that have it; None where none has."""
    known = [row[name] for row in rows if row[name] is not None]
    return float(mean(known)) if known else None
