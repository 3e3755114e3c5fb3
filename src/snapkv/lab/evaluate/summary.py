"""From answers to rows: the mean of every method in every cell."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from snapkv.lab.evaluate.store import Key, Record, key
from snapkv.lab.evaluate.task import Task


def summarise(records: Iterable[Record], keys: Iterable[Key], task: Task) -> list[Record]:
    """One row per method, setting and cell, in the order in which they are asked for.

    A row holds: task, metric, method, question, cell, policy; status ("ok" where any sample was
    answered, else the reason of the first), samples (answered), failed (by reason), score (mean, 0
    to 1, None where none was answered), prompt_tokens, kept_tokens and held_bytes (means),
    token_ms and first_token_ms (medians).

    Args:
        records: answers; a folder may hold more than are asked for.
        keys: the answers to look at.
        task: what was asked.
    """
    known = {key(record): record for record in records}
    groups: dict[str, list[Record]] = {}
    for record in (known[wanted] for wanted in keys if wanted in known):
        group = json.dumps([record["method"], record["question"], record["cell"]])
        groups.setdefault(group, []).append(record)
    return [_row(group, task) for group in groups.values()]


def _row(records: list[Record], task: Task) -> Record:
    first = records[0]
    answered = [record for record in records if record["status"] == "ok"]
    failed = [record["status"] for record in records if record["status"] != "ok"]
    return {
        "task": task.name,
        "metric": task.metric,
        "method": first["method"],
        "question": first["question"],
        "cell": first["cell"],
        "policy": first["policy"],
        "status": "ok" if answered else failed[0],
        "samples": len(answered),
        "failed": {reason: failed.count(reason) for reason in sorted(set(failed))},
        "score": mean_of(answered, "score"),
        "prompt_tokens": mean_of(answered, "prompt_tokens"),
        "kept_tokens": mean_of(answered, "kept_tokens"),
        "held_bytes": mean_of(answered, "held_bytes"),
        "token_ms": mean_of(answered, "token_ms", median),
        "first_token_ms": mean_of(answered, "first_token_ms", median),
    }


@dataclass(frozen=True, kw_only=True)
class ScoreLine:
    """A method in a table: its scores by column, and what it cost.

    Attributes:
        method: its label.
        question: "visible" or "hidden".
        scores: mean score, 0 to 1, by column; without the columns that have none.
        reasons: why a column has none, such as "out of memory".
        held_bytes: keys and values, the mean; None where nothing was answered.
        token_ms: per token, the mean over cells; None where nothing was timed.
    """

    method: str
    question: str
    scores: dict[Any, float]
    reasons: dict[Any, str]
    held_bytes: float | None
    token_ms: float | None

    @property
    def mean(self) -> float | None:
        """Over the columns that have a score, as papers average over data sets."""
        return fmean(self.scores.values()) if self.scores else None

    def shown(self, column: Any) -> str:
        """A column's score times 100 as text, or why there is none; "" where it was not asked."""
        if column in self.scores:
            return shown_score(self.scores[column])
        return self.reasons.get(column, "")


def shown_score(score: float | None) -> str:
    """A score times 100 as text; a dash for none."""
    return "-" if score is None else f"{100 * score:.1f}"


def score_lines(rows: Sequence[Record], axis: str) -> list[ScoreLine]:
    """A line per method and question, in the order of the rows; columns are the axis' values."""
    lines: dict[tuple[str, str], list[Record]] = {}
    for row in rows:
        lines.setdefault((row["method"], row["question"]), []).append(row)
    return [_score_line(of_line, axis) for of_line in lines.values()]


def axis_values(rows: Iterable[Record], axis: str) -> list[Any]:
    """The values of an axis, each once, in the order of the rows."""
    return list(dict.fromkeys(row["cell"][axis] for row in rows))


def _score_line(rows: list[Record], axis: str) -> ScoreLine:
    columns: dict[Any, list[Record]] = {}
    for row in rows:
        columns.setdefault(row["cell"][axis], []).append(row)
    means = {value: mean_of(of_column, "score") for value, of_column in columns.items()}
    return ScoreLine(
        method=rows[0]["method"],
        question=rows[0]["question"],
        scores={value: mean for value, mean in means.items() if mean is not None},
        reasons={value: columns[value][0]["status"] for value in means if means[value] is None},
        held_bytes=mean_of(rows, "held_bytes"),
        token_ms=mean_of(rows, "token_ms"),
    )


def mean_of(rows: Sequence[Record], name: str, mean: Any = fmean) -> float | None:
    """The mean of a number over the rows that have it; None where none has."""
    known = [row[name] for row in rows if row[name] is not None]
    return float(mean(known)) if known else None
