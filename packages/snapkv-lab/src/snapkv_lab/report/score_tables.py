"""The numbers of a run as tables: of methods for people, of cells for programs."""

import csv
import html
import io
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snapkv.policies import FullCache
from snapkv.validation import format_bytes
from snapkv_lab.evaluate.intervals import (
    METHOD,
    Difference,
    Measure,
    line_differences,
    relative_differences,
)
from snapkv_lab.evaluate.runner import Results
from snapkv_lab.evaluate.store import Record
from snapkv_lab.evaluate.summary import (
    IN_NATS,
    IN_PERCENT,
    Scale,
    ScoreLine,
    axis_values,
    score_lines,
    shown_interval,
    shown_loss,
    shown_score,
)

_BEFORE_SCORES = ("method", "question")
_NUMBERS = (
    *("samples", "score", "prompt_tokens", "kept_tokens", "held_bytes", "token_ms"),
    "first_token_ms",
)


@dataclass(frozen=True, kw_only=True)
class MethodTable:
    """A row per method: its score in every column, their mean with its interval, what it cost.

    Where the full cache ran too, the differences from it stand behind the mean: the relative one,
    and the one of the scores with its interval. Where the loss of the references was taken, its
    mean follows, with its interval and its difference from the full cache.

    Attributes:
        title: what is measured.
        caption: what the intervals are, and which methods dropped nothing of some prompts.
        headings: of the columns.
        rows: texts under the headings; scores times 100, or why there is none. Those that a paper
            gives for the model come last, and say so.
        best: the places (row, column) of the best of the measured scores of each column.
    """

    title: str
    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: frozenset[tuple[int, int]]


def method_table(results: Results) -> MethodTable:
    """The table of a run, by the first axis of its task."""
    task, axis = results.task, results.task.axes[0]
    columns, lines = axis_values(results.rows, axis), score_lines(results.rows, axis)
    compared = _Compared(
        relative=relative_differences(results.rows),
        differences=line_differences(results.rows, axis),
        losses=line_differences(results.rows, axis, "loss") if has_losses(results) else None,
    )
    return MethodTable(
        title=f"{task.name}: {task.metric} by {axis}",
        caption=f"95 %: interval of the mean, {METHOD}{_OF_LOSS if has_losses(results) else ''}"
        f"{_left_whole(results.rows)}",
        headings=(
            *(*_BEFORE_SCORES, *map(str, columns), "mean", "95 %"),
            *(*compared.headings, "cache", "ms/token"),
        ),
        rows=tuple(
            _texts(line, columns, compared) for line in [*lines, *_published(results, columns)]
        ),
        best=_best(lines, columns),
    )


def _left_whole(rows: Sequence[Record]) -> str:
    """Of which methods some prompts were as short as the budget, so that nothing was dropped."""
    asked, whole = Counter[str](), Counter[str]()
    for row in rows:
        if row["policy"]["name"] != FullCache.name and "compressed" in row:  # as in later releases
            asked[row["method"]] += row["samples"]
            whole[row["method"]] += row["samples"] - row["compressed"]
    found = (
        f"; {name}: nothing was dropped of {n:,} of {asked[name]:,} prompts"
        for name, n in whole.items()
        if n
    )
    return "".join(found)


def has_losses(results: Results) -> bool:
    """Whether the loss of the references was taken."""
    return any("loss" in row for row in results.rows)


_OF_LOSS = (
    "; loss: mean negative log-likelihood of the reference in nats per token, lower is better"
)


def cell_table(results: Results) -> list[dict[str, Any]]:
    """A row per method, question and cell, numbers as they were measured."""
    model = results.run["model"]["name"]
    return [
        {"task": row["task"], "metric": row["metric"], "model": model}
        | {"method": row["method"], "question": row["question"], **row["cell"]}
        | {"status": row["status"], "failed": sum(row["failed"].values())}
        | {name: row[name] for name in _NUMBERS}
        | _ends("score", row["interval"])
        | _difference("difference", row["difference"], "score")
        | (_losses(row) if has_losses(results) else {})
        for row in results.rows
    ]


def _losses(row: Record) -> dict[str, float | None]:
    """The loss of the references and its difference from the full cache, with their intervals."""
    return (
        {"loss": row["loss"]}
        | _ends("loss", row["loss_interval"])
        | _difference("loss_difference", row["loss_difference"], "loss")
    )


def _difference(name: str, found: Record | None, of: Measure) -> dict[str, float | None]:
    """A difference from the full cache, with its interval."""
    given = found or {of: None, "interval": None}
    return {name: given[of]} | _ends(name, given["interval"])


def _ends(name: str, interval: Sequence[float] | None) -> dict[str, float | None]:
    low, high = interval or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


def as_csv(results: Results) -> str:
    """The table of cells; a number that is not known is empty."""
    rows = cell_table(results)
    target = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(target, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return target.getvalue()


def as_markdown(results: Results) -> str:
    """The table of methods, the best scores in bold."""
    table, left = method_table(results), len(_BEFORE_SCORES)
    body = markdown_table(table.headings, table.rows, left=left, bold=table.best)
    model = escaped(results.run["model"]["name"])
    return f"# {escaped(table.title)}\n\nModel: {model}\n\n{body}\n\n{escaped(table.caption)}\n"


def markdown_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: int,
    bold: Collection[tuple[int, int]] = (),
) -> str:
    """Texts as a table.

    Args:
        headings: of the columns.
        rows: texts under the headings.
        left: how many of the first columns stand on the left.
        bold: places (row, column).
    """
    lines = [[escaped(heading) for heading in headings]]
    lines.append(["---"] * left + ["---:"] * (len(headings) - left))
    lines += [
        [
            f"**{escaped(text)}**" if (row, column) in bold else escaped(text)
            for column, text in enumerate(texts)
        ]
        for row, texts in enumerate(rows)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """Differences from the full cache by method and question; nothing where it did not run.

    Attributes:
        relative: of the scores. differences: of the scores.
        losses: differences of the losses; None where they were not taken.
    """

    relative: Mapping[tuple[str, str], float]
    differences: Mapping[tuple[str, str], Difference]
    losses: Mapping[tuple[str, str], Difference] | None

    @property
    def headings(self) -> tuple[str, ...]:
        scores = ("vs full", "difference") if self.differences else ()
        if self.losses is None:
            return scores
        return (*scores, "loss", "loss 95 %", *(("loss difference",) if self.losses else ()))

    def texts(self, line: ScoreLine) -> tuple[str, ...]:
        place = (line.method, line.question)
        relative, difference = self.relative.get(place), self.differences.get(place)
        texts = (
            "-" if relative is None else f"{100 * relative:+.1f} %",
            shown_difference(difference),
        )
        return (*(texts if self.differences else ()), *self._losses(line))

    def _losses(self, line: ScoreLine) -> tuple[str, ...]:
        if self.losses is None:
            return ()
        difference = self.losses.get((line.method, line.question))
        return (
            shown_loss(line.loss),
            "-" if line.loss is None else shown_interval(line.loss_interval, IN_NATS),
            *((shown_difference(difference, IN_NATS),) if self.losses else ()),
        )


def shown_difference(difference: Difference | None, scale: Scale = IN_PERCENT) -> str:
    """A difference with its interval, and whether none is seen; a dash for None."""
    if difference is None:
        return "-"
    seen = "" if difference.is_seen or difference.interval is None else f", {NONE_SEEN}"
    interval = shown_interval(difference.interval, scale)
    return f"{scale.text(difference.mean, '+')} ({interval}){seen}"


NONE_SEEN = "no difference seen"
"""What is said of a method where zero lies within the interval of its difference."""


def _texts(line: ScoreLine, columns: Sequence[Any], compared: _Compared) -> tuple[str, ...]:
    return (
        line.method,
        line.question,
        *map(line.shown, columns),
        shown_score(line.mean),
        line.shown_interval,
        *compared.texts(line),
        "-" if line.held_bytes is None else format_bytes(round(line.held_bytes)),
        "-" if line.token_ms is None else f"{line.token_ms:.0f}",
    )


def _published(results: Results, columns: Sequence[Any]) -> list[ScoreLine]:
    """What a paper gives for the model in the columns of the run."""
    given = results.task.published(results.run["model"]["name"])
    return [
        ScoreLine(
            method=f"paper: {method}",
            question="visible",
            scores={column: scores[column] for column in columns if column in scores},
            intervals={},
            interval=None,
            reasons={},
            held_bytes=None,
            token_ms=None,
        )
        for method, scores in given.items()
    ]


def _best(lines: Sequence[ScoreLine], columns: Sequence[Any]) -> frozenset[tuple[int, int]]:
    """Where a table has the highest of each column; all that look alike.

    A mean over fewer columns than another's is not compared with it.
    """
    most = max((len(line.scores) for line in lines), default=0)
    values = [
        [
            *(line.scores.get(column) for column in columns),
            line.mean if len(line.scores) == most else None,
        ]
        for line in lines
    ]
    return frozenset(
        (row, place)
        for place, column in enumerate(zip(*values, strict=True), len(_BEFORE_SCORES))
        for row, score in enumerate(column)
        if score is not None
        and shown_score(score) == shown_score(max(s for s in column if s is not None))
    )


def escaped(text: str) -> str:
    """Text that Markdown takes for nothing else."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|").replace("*", "\\*")
