"""The output of the laboratory's commands: JSON, or a table on the terminal."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.text import Text

from snapkv.errors import OutputError
from snapkv.validation import format_bytes
from snapkv_app.cli.grid import Grid, give
from snapkv_lab.evaluate.store import RunSummary
from snapkv_lab.report.tables import Table
from snapkv_lab.rows import Row


def print_results(
    results: Row,
    table: Callable[[], Table],
    *,
    as_json: bool,
    place: str = "",
    unwritten: OutputError | None = None,
) -> None:
    """Print the results, and only then fail if a part could not be written.

    Args:
        results: the results as JSON.
        table: makes the table, if JSON is not wanted.
        as_json: whether to print JSON.
        place: a line about where the results are stored.
        unwritten: the error of the part that could not be written, or None.

    Raises:
        OutputError: `unwritten`, after the results are printed.
    """
    give(results, lambda: to_grid(table()), as_json=as_json, place=place)
    if unwritten is not None:  # the results of a long run are printed before it fails
        raise unwritten


def print_summary(
    summary: RunSummary, table: Callable[[], Table], *, as_json: bool, place: str, **more: Any
) -> None:
    """Print the result of a run as a table or as JSON.

    Args:
        summary: the result.
        table: makes the table, if JSON is not wanted.
        as_json: whether to print JSON.
        place: a line about where the results are stored.
        more: further fields of the JSON object.

    Raises:
        OutputError: the summary could not be written.
    """
    results = {"run": summary.run, "folder": str(summary.folder), "rows": summary.rows} | more
    print_results(results, table, as_json=as_json, place=place, unwritten=summary.unwritten)


def to_grid(table: Table) -> Grid:
    """Convert a table to a grid that can be shown on the terminal. Its bold cells stay bold."""
    return Grid(
        title=table.title,
        caption=table.caption,
        headings=tuple(table.headings),
        rows=tuple(
            tuple(
                Text(text, "bold" if (row, place) in table.bold else "")
                for place, text in enumerate(texts)
            )
            for row, texts in enumerate(table.rows)
        ),
        left=table.left,
    )


def metrics_table(title: str, rows: Sequence[Row]) -> Table:
    """Return a table of the scores from lm-eval, with a line for each metric of each task and a
    column for each method.

    Args:
        title: the title of the table.
        rows: the rows of `HarnessRun.evaluate`. Every method must have a row for every metric of
            every task.
    """
    methods = tuple(dict.fromkeys(row["method"] for row in rows))
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        name = f"{row['metric']}, {row['filter']}"
        lines.setdefault((row["task"], name), {})[row["method"]] = f"{row['score']:.4f}"
    texts = [(*names, *(scores[method] for method in methods)) for names, scores in lines.items()]
    return Table(title=title, headings=("task", "metric", *methods), rows=texts, left=2)


def bench_table(rows: Sequence[Row]) -> Table:
    """Return a table with a line per measurement, and all columns that any measurement has. The
    status is left out if all measurements are "ok".
    """
    lines = [_format_measurement(row) for row in rows]
    names = list(dict.fromkeys(name for row in lines for name in row))
    if rows and all(row["status"] == "ok" for row in rows):
        names.remove("status")
    texts = [tuple(row.get(name, "") for name in names) for row in lines]
    return Table(headings=names, rows=texts, caption="times and ratios are medians")


def _format_measurement(row: Row) -> dict[str, str]:
    """Return the cells of a measurement as text, by heading. Percentiles are shown by their median.
    Fields that are None are left out, and so are "bench", "filled" and "least_ms".
    """
    cells = {}
    for name, value in row.items():
        if name in ("bench", "filled", "least_ms") or value is None:
            continue
        heading = name.removesuffix("_bytes").replace("_", " ")
        if isinstance(value, dict):
            cells[heading] = f"{value['p50']:.3g}"
        elif name.endswith("_bytes"):
            cells[heading] = format_bytes(value)
        elif name == "of_ceiling":
            cells[heading] = f"{value:.0%}"
        else:
            cells[heading] = f"{value:,}" if type(value) is int else str(value)
    return cells
