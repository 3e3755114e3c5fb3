"""The report of a run: an HTML page that needs no other file, and tables as CSV and Markdown."""

import base64
import csv
import importlib.util
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from snapkv.cache.saving.writing import naming, replace_file
from snapkv.errors import missing_package
from snapkv.policies import FullCache
from snapkv_lab.drawing import encode_figure, require_drawable
from snapkv_lab.evaluate.intervals import METHOD, line_differences, relative_differences
from snapkv_lab.evaluate.runner import Results
from snapkv_lab.evaluate.summary import ScoreLine, axis_values, score_lines
from snapkv_lab.report import figures
from snapkv_lab.report.tables import (
    IN_NATS,
    IN_PERCENT,
    Table,
    escape_markdown,
    format_difference,
    format_optional_bytes,
)
from snapkv_lab.rows import Row

_NUMBERS = (
    *("samples", "score", "prompt_tokens", "kept_tokens", "held_bytes", "token_ms"),
    "first_token_ms",
)
_OF_LOSS = (
    "; loss: mean negative log-likelihood of the reference in nats per token, lower is better"
)
_REASONS = {
    "too long": "prompt and answer need more positions than the model has",
    "out of memory": "the device had no memory left for it",
}

Pairs = Iterator[tuple[str, str]]
"""The cells of one table row: pairs of a heading and a text."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the page, with figures and a table.

    A folded section is closed at first.
    """

    title: str
    table: Table | None = None
    figures: Sequence[Mapping[str, str]] = ()
    folded: bool = False


def _flatten_settings(block: Row, before: str = "") -> Pairs:
    """Yield the names and the values of all settings as text. The name of a nested setting begins
    with the names of the levels above it, such as "model: name".

    Args:
        block: the settings.
        before: the text before each name.
    """
    for name, value in block.items():
        if isinstance(value, dict):
            yield from _flatten_settings(value, f"{before}{name}: ")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield f"{before}{name}", text


def require_reportable() -> None:
    """Check that a page can be made, before a long run starts.

    Raises:
        MissingDependencyError: jinja2 or matplotlib is not installed.
    """
    if importlib.util.find_spec("jinja2") is None:
        raise missing_package("report: writing a page", "jinja2")
    require_drawable()


def write_report(results: Results, folder: str) -> Path:
    """Write the page, the table of cells and the table of methods into a folder.

    The files are `index.html`, `results.csv` and `results.md`. The folder is made if it is missing.
    Each file is written completely or not at all.

    Returns:
        The path of the page.

    Raises:
        OutputError: the folder or a file cannot be written.
    """
    target = Path(folder)
    page, cells, methods = render_page(results), render_csv(results), render_markdown(results)
    with naming(target):
        target.mkdir(parents=True, exist_ok=True)
    for name, text in (("index.html", page), ("results.csv", cells), ("results.md", methods)):
        replace_file(target / name, text)
    return target / "index.html"


def method_table(results: Results) -> Table:
    """Return a table with the scores and the costs of each method.

    If the full cache ran too, the differences from it follow the mean: the relative difference, and
    the difference of the scores with its interval. If the loss of the references was measured, its
    mean follows with its interval and its difference from the full cache. Scores are multiplied by
    100; a missing score shows the reason. Scores that a paper published for the model come last.
    The best measured score of each column is bold.
    """
    task, axis, rows = results.task, results.task.axes[0], results.rows
    columns, lines = axis_values(rows, axis), score_lines(rows, axis)
    relative, differences = relative_differences(rows), line_differences(rows, axis)
    has_loss = has_losses(results)
    losses = line_differences(rows, axis, "loss") if has_loss else {}

    def shown(line: ScoreLine) -> Pairs:
        place = (line.method, line.question)
        yield from zip(("method", "question"), place, strict=True)
        for column in columns:
            score = line.scores.get(column)
            is_lost = score is None
            yield str(column), line.reasons.get(column, "") if is_lost else IN_PERCENT.text(score)
        yield "mean", IN_PERCENT.text(line.mean)
        yield "95 %", IN_PERCENT.interval(line.interval) if line.intervals else "-"
        if differences:
            yield "vs full", f"{100 * relative[place]:+.1f} %" if place in relative else "-"
            yield "difference", format_difference(differences.get(place))
        if has_loss:
            yield from _loss_cells(line.loss, line.loss_interval)
        if losses:
            yield "loss difference", format_difference(losses.get(place), "loss")
        yield "cache", format_optional_bytes(line.held_bytes)
        yield "ms/token", "-" if line.token_ms is None else f"{line.token_ms:.0f}"

    return Table(
        title=f"{task.name}: {task.metric} by {axis}",
        caption=f"95 %: interval of the mean, {METHOD}{_OF_LOSS if has_loss else ''}"
        f"{_describe_unpruned(rows)}",
        left=2,
        bold=_find_best(lines, columns),
        **_split_pairs(map(shown, [*lines, *_published_lines(results, columns)])),
    )


def _split_pairs(lines: Iterable[Pairs]) -> dict[str, Any]:
    """Split pairs of headings and texts into the arguments `headings` and `rows` of a `Table`.

    The headings are those of the first line; all lines must have the same.
    """
    rows = [list(line) for line in lines]
    headings = tuple(heading for heading, _ in rows[0]) if rows else ()
    return {"headings": headings, "rows": [tuple(text for _, text in line) for line in rows]}


def has_losses(results: Results) -> bool:
    """Return whether the loss of the references was measured."""
    return any("loss" in row for row in results.rows)


def _describe_unpruned(rows: Sequence[Row]) -> str:
    """Return a text for the end of a caption about prompts of which a method dropped nothing,
    because they were not longer than its budget.

    Returns:
        For each method that has any, a clause that begins with "; ". The text is empty if every
        method except the full cache dropped tokens of every prompt.
    """
    prompts, unpruned = Counter[str](), Counter[str]()
    for row in rows:
        # Rows of early releases do not say how many prompts were compressed.
        if row["policy"]["name"] != FullCache.name and "compressed" in row:
            prompts[row["method"]] += row["samples"]
            unpruned[row["method"]] += row["samples"] - row["compressed"]
    return "".join(
        f"; {name}: nothing was dropped of {n:,} of {prompts[name]:,} prompts"
        for name, n in unpruned.items()
        if n
    )


def _published_lines(results: Results, columns: Sequence[Any]) -> list[ScoreLine]:
    """Return a line of the table for each method with scores that a paper has published for the
    model of the run. There are no lines if no paper has the model.

    Args:
        results: the results of the run.
        columns: the columns of the table; scores of other columns are left out.
    """
    published = results.task.published(results.run["model"]["name"])
    return [
        ScoreLine(
            method=f"paper: {method}",
            question="visible",
            scores={column: scores[column] for column in columns if column in scores},
            intervals={},
            reasons={},
        )
        for method, scores in published.items()
    ]


def _find_best(lines: Sequence[ScoreLine], columns: Sequence[Any]) -> frozenset[tuple[int, int]]:
    """Find the cells with the best score in each column of the table of methods, which are shown in
    bold. Cells with equal texts all count. A mean over fewer columns is not compared with a mean
    over all of them.

    Args:
        lines: the lines of the table.
        columns: the columns with scores, which the mean follows.

    Returns:
        (row, column) of each cell in the table, whose first two columns have no scores.
    """
    most = max((len(line.scores) for line in lines), default=0)
    values = [
        [line.scores.get(column) for column in columns]
        + [line.mean if len(line.scores) == most else None]
        for line in lines
    ]
    places = set()
    for place, column in enumerate(zip(*values, strict=True), 2):
        highest = max((score for score in column if score is not None), default=None)
        places |= {
            (row, place)
            for row, score in enumerate(column)
            if score is not None and IN_PERCENT.text(score) == IN_PERCENT.text(highest)
        }
    return frozenset(places)


def _loss_cells(loss: float | None, interval: Sequence[float] | None) -> Pairs:
    """Yield the cells of a mean loss and its interval; dashes if there is no loss."""
    yield "loss", IN_NATS.text(loss)
    yield "loss 95 %", "-" if loss is None else IN_NATS.interval(interval)


def cell_table(results: Results) -> list[Row]:
    """Return one flat row per method, question and cell, with numbers as they were measured.

    Scores are from 0 to 1. A number that was not measured is None.
    """
    model, more = results.run["model"]["name"], has_losses(results)
    return [
        {"task": row["task"], "metric": row["metric"], "model": model}
        | {"method": row["method"], "question": row["question"], **row["cell"]}
        | {"status": row["status"], "failed": sum(row["failed"].values())}
        | {name: row[name] for name in _NUMBERS}
        | _interval_fields("score", row["interval"])
        | _difference_fields("difference", row["difference"], "score")
        | ({"loss": row["loss"]} | _interval_fields("loss", row["loss_interval"]) if more else {})
        | (_difference_fields("loss_difference", row["loss_difference"], "loss") if more else {})
        for row in results.rows
    ]


def _difference_fields(name: str, measured: Row | None, of: str) -> Row:
    difference = measured or {of: None, "interval": None}
    return {name: difference[of]} | _interval_fields(name, difference["interval"])


def _interval_fields(name: str, interval: Sequence[float] | None) -> Row:
    low, high = interval or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


def render_csv(results: Results) -> str:
    """Return the rows of `cell_table` in CSV format, after a line with their names."""
    rows = cell_table(results)
    target = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(target, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return target.getvalue()


def render_markdown(results: Results) -> str:
    """Return a page in Markdown format with the title, the model, the table of methods, and its
    caption.
    """
    table = method_table(results)
    model = escape_markdown(results.run["model"]["name"])
    parts = (f"# {escape_markdown(table.title)}", f"Model: {model}", table.as_markdown())
    return "\n\n".join((*parts, escape_markdown(table.caption))) + "\n"


def render_page(results: Results) -> str:
    """Return the page as a single HTML document without links to other files.

    jinja2 and matplotlib must be installed, see `require_reportable`.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    task, methods = results.task, method_table(results)
    policies = {f"method {row['method']}": row["policy"] for row in results.rows}
    caption = (
        f"{methods.title}; the best of every column is bold; means are over the columns with a "
        f"score. {methods.caption}"
    )
    failures = _failures(results)
    facts = list(_flatten_settings(results.run | policies))
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # texts of the user are no markup
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        title=f"{task.name} on {results.run['model']['name']}",
        about=f"{results.run['samples']} samples for every method. Scores are {task.metric} times "
        "100. The cache is what its keys and values take when an answer is complete, the mean.",
        sections=[
            Section(title="Methods", table=replace(methods, caption=caption)),
            Section(title="Figures", figures=list(_pictures(results))),
            *([Section(title="Without an answer", table=failures)] if failures.rows else []),
            Section(title="Cells", table=_cells(results), folded=True),
            Section(
                title="To make it again",
                table=Table(
                    headings=("setting", "value"),
                    rows=facts,
                    caption="What the results depend on",
                    left=2,
                ),
            ),
        ],
    )


def _pictures(results: Results) -> Iterator[dict[str, str]]:
    """Yield each figure of the run as a "title", an "alt" text, and a "source".

    The source is a data URL with the figure as SVG.
    """
    lines = score_lines(results.rows, results.task.axes[0])
    means = "; ".join(
        f"{line.method} ({line.question}) {IN_PERCENT.text(line.mean)}" for line in lines
    )
    titles = {
        "scores": f"{results.task.metric} by {' and '.join(results.task.axes[:2])}",
        "budgets": f"{results.task.metric} by budget",
        "loss": "loss of the reference",
    }
    for name, figure in figures.draw(results).items():
        data = base64.b64encode(encode_figure(figure, ".svg")).decode()
        yield {
            "title": titles[name],
            "alt": f"{titles[name]} of every method. Means: {means}.",  # for screen readers
            "source": f"data:image/svg+xml;base64,{data}",
        }


def _cells(results: Results) -> Table:
    """Return a table with one line per method, question and cell.

    A cell without a score shows its status.
    """
    axes = list(dict.fromkeys(name for row in results.rows for name in row["cell"]))
    has_loss = has_losses(results)

    def counted(number: float | None) -> str:
        return "-" if number is None else f"{number:,.0f}"

    def shown(row: Row) -> Pairs:
        yield from ((name, row[name]) for name in ("method", "question"))
        yield from ((axis, str(row["cell"].get(axis, ""))) for axis in axes)
        is_scored = row["score"] is not None
        yield "score", IN_PERCENT.text(row["score"]) if is_scored else row["status"]
        yield "95 %", IN_PERCENT.interval(row["interval"]) if is_scored else "-"
        yield "difference", format_difference(row["difference"])
        if has_loss:
            yield from _loss_cells(row["loss"], row["loss_interval"])
            yield "loss difference", format_difference(row["loss_difference"], "loss")
        yield "samples", str(row["samples"])
        yield "prompt tokens", counted(row["prompt_tokens"])
        yield "kept tokens", counted(row["kept_tokens"])
        yield "cache", format_optional_bytes(row["held_bytes"])
        yield "first token", f"{counted(row['first_token_ms'])} ms"
        yield "ms/token", counted(row["token_ms"])

    return Table(
        caption="Means over the samples of a cell, with their intervals; differences are from the "
        "full cache; times are medians",
        left=2,
        **_split_pairs(map(shown, results.rows)),
    )


def _failures(results: Results) -> Table:
    """Return a table of the samples without an answer, by method, question and reason.

    It has no rows if all samples were answered.
    """
    axis = results.task.axes[0]
    counts: dict[tuple[str, str, str], Counter[Any]] = {}
    for row in results.rows:
        for reason, count in row["failed"].items():
            columns = counts.setdefault((row["method"], row["question"], reason), Counter())
            columns[row["cell"][axis]] += count
    rows = []
    for (method, question, reason), columns in counts.items():
        why = f"{reason}: {_REASONS[reason]}" if reason in _REASONS else reason
        where = f"{axis} {', '.join(map(str, columns))}"
        rows.append((method, question, why, str(columns.total()), where))
    headings = ("method", "question", "reason", "samples", "where")
    return Table(headings=headings, rows=rows, caption="These samples are in no mean", left=5)
