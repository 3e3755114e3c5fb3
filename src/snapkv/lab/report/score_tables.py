"""The numbers of a run as tables: of methods for people, of cells for programs."""

import csv
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snapkv.lab.evaluate.differences import relative_differences
from snapkv.lab.evaluate.runner import Results
from snapkv.lab.evaluate.summary import ScoreLine, axis_values, score_lines, shown_score
from snapkv.validation import format_bytes

_BEFORE_SCORES = ("method", "question")
_NUMBERS = (
    *("samples", "score", "prompt_tokens", "kept_tokens", "held_bytes", "token_ms"),
    "first_token_ms",
)


@dataclass(frozen=True, kw_only=True)
class MethodTable:
    """A row per method: its score in every column, their mean, and what it cost.

    Where the full cache ran too, the relative difference to it stands behind the mean.

    Attributes:
        title: what is measured.
        headings: of the columns.
        rows: texts under the headings; scores times 100, or why there is none. Those that a paper
            gives for the model come last, and say so.
        best: the places (row, column) of the best of the measured scores of each column.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: frozenset[tuple[int, int]]


def method_table(results: Results) -> MethodTable:
    """The table of a run, by the first axis of its task."""
    task, axis = results.task, results.task.axes[0]
    columns, lines = axis_values(results.rows, axis), score_lines(results.rows, axis)
    differences = relative_differences(results.rows)
    compared = ("vs full",) if differences else ()
    return MethodTable(
        title=f"{task.name}: {task.metric} by {axis}",
        headings=(*_BEFORE_SCORES, *map(str, columns), "mean", *compared, "cache", "ms/token"),
        rows=tuple(
            _texts(line, columns, differences) for line in [*lines, *_published(results, columns)]
        ),
        best=_best(lines, columns),
    )


def cell_table(results: Results) -> list[dict[str, Any]]:
    """A row per method, question and cell, numbers as they were measured."""
    model = results.run["model"]["name"]
    return [
        {"task": row["task"], "metric": row["metric"], "model": model}
        | {"method": row["method"], "question": row["question"], **row["cell"]}
        | {"status": row["status"], "failed": sum(row["failed"].values())}
        | {name: row[name] for name in _NUMBERS}
        for row in results.rows
    ]


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
    table = method_table(results)
    rows = [
        [
            f"**{_escaped(text)}**" if (row, column) in table.best else _escaped(text)
            for column, text in enumerate(texts)
        ]
        for row, texts in enumerate(table.rows)
    ]
    rule = ["---", "---", *["---:"] * (len(table.headings) - len(_BEFORE_SCORES))]
    lines = [[_escaped(heading) for heading in table.headings], rule, *rows]
    body = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"# {_escaped(table.title)}\n\nModel: {_escaped(results.run['model']['name'])}\n\n{body}"


def _texts(
    line: ScoreLine, columns: Sequence[Any], differences: Mapping[tuple[str, str], float]
) -> tuple[str, ...]:
    difference = differences.get((line.method, line.question))
    compared = "-" if difference is None else f"{100 * difference:+.1f} %"
    return (
        line.method,
        line.question,
        *map(line.shown, columns),
        shown_score(line.mean),
        *([compared] if differences else []),
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


def _escaped(text: str) -> str:
    """Text that Markdown takes for nothing else."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|").replace("*", "\\*")
