"""Rows of the laboratory's results as tables for a terminal."""

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from snapkv.cli.grid import Grid
from snapkv.validation import format_bytes
from snapkv_lab.evaluate.intervals import METHOD
from snapkv_lab.evaluate.runner import Results
from snapkv_lab.report import leaderboard
from snapkv_lab.report.page import method_table
from snapkv_lab.study.base import Table


def results_table(results: Results) -> Grid:
    """Mean scores, times 100, with their intervals, and costs: a row per method.

    The best of the measured scores are bold.
    """
    scores = method_table(results)
    return Grid(
        title=scores.title,
        caption=scores.caption,
        headings=scores.headings,
        rows=tuple(
            tuple(
                Text(text, "bold" if (row, place) in scores.best else "")
                for place, text in enumerate(texts)
            )
            for row, texts in enumerate(scores.rows)
        ),
    )


def board_table(found: dict[str, Any]) -> Grid:
    """A row per method, share and setting of a leaderboard; tasks one by one are on its page."""

    def without_tasks(cells: Sequence[str]) -> tuple[str, ...]:
        return (*cells[:3], *cells[-3:])

    return Grid(
        title=f"leaderboard of {found['model']['name']}",
        caption=f"95 %: interval of the mean over tasks, {METHOD}",
        headings=("question", *without_tasks(leaderboard.headings(found))),
        rows=tuple(
            (line.scores.question, *without_tasks(leaderboard.texts(line, found)))
            for line in leaderboard.board_lines(found)
        ),
        left=2,
    )


def metrics_table(title: str, rows: Sequence[dict[str, Any]]) -> Grid:
    """A row per task and metric of another harness, a column per method."""
    methods = tuple(dict.fromkeys(row["method"] for row in rows))
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        name = f"{row['metric']}, {row['filter']}"
        lines.setdefault((row["task"], name), {})[row["method"]] = f"{row['score']:.4f}"
    return Grid(
        title=title,
        headings=("task", "metric", *methods),
        rows=tuple(
            (*names, *(scores[method] for method in methods)) for names, scores in lines.items()
        ),
        left=2,
    )


def bench_table(rows: Sequence[dict[str, Any]]) -> Grid:
    """A row per measurement, with the columns that any of them has."""
    shown = [_shown(row) for row in rows]
    names = list(dict.fromkeys(name for row in shown for name in row))
    if rows and all(row["status"] == "ok" for row in rows):
        names.remove("status")
    return Grid(
        headings=tuple(names),
        rows=tuple(tuple(row.get(name, "") for name in names) for row in shown),
        caption="times and ratios are medians",
    )


def _shown(row: dict[str, Any]) -> dict[str, str]:
    """A measurement as text: medians of what has percentiles, bytes with a unit."""
    cells = {}
    for name, value in row.items():
        if name in ("bench", "filled", "least_ms") or value is None:
            continue
        if isinstance(value, dict):
            cells[name.replace("_", " ")] = f"{value['p50']:.3g}"
        elif name.endswith("_bytes"):
            cells[name.removesuffix("_bytes").replace("_", " ")] = format_bytes(value)
        elif name == "of_ceiling":
            cells["of ceiling"] = f"{value:.0%}"
        else:
            cells[name.replace("_", " ")] = f"{value:,}" if type(value) is int else str(value)
    return cells


def study_table(found: Table) -> Grid:
    """What a study found, as it says it."""
    return Grid(
        title=found.title, headings=found.header, rows=tuple(found.lines), left=len(found.header)
    )
