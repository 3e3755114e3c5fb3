"""A page out of tables and figures, one file without links to others; and the page of a run."""

import base64
import csv
import importlib.util
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from snapkv.cache.saving.writing import naming, replace_file
from snapkv.errors import missing_package
from snapkv.policies import FullCache
from snapkv_lab.drawing import encoded, require_drawable
from snapkv_lab.evaluate.intervals import METHOD, line_differences, relative_differences
from snapkv_lab.evaluate.runner import Results
from snapkv_lab.evaluate.summary import ScoreLine, axis_values, score_lines
from snapkv_lab.report import figures
from snapkv_lab.report.tables import (
    IN_NATS,
    IN_PERCENT,
    Table,
    escaped,
    shown_bytes,
    shown_difference,
)
from snapkv_lab.rows import Row

FILES = ("index.html", "results.csv", "results.md")
"""What `write_report` writes; the page comes first."""

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


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page: figures, see `picture`, and a table, which `folded` ones hide at first."""

    title: str
    table: Table | None = None
    figures: Sequence[Mapping[str, str]] = ()
    folded: bool = False


def as_html(title: str, about: Sequence[str], sections: Sequence[Section]) -> str:
    """A page; everything that is not markup is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("page.html")
    return template.render(title=title, about=about, sections=sections)


def picture(figure: Any, title: str, alt: str) -> dict[str, str]:
    """A figure inside a page, with its text for those who do not see it."""
    data = base64.b64encode(encoded(figure, ".svg")).decode()
    return {"title": title, "alt": alt, "source": f"data:image/svg+xml;base64,{data}"}


def facts_section(block: Row) -> Section:
    """Settings as names and texts, what is inside another under both names."""

    def facts(block: Row, before: str) -> Iterator[tuple[str, str]]:
        for name, value in block.items():
            if isinstance(value, dict):
                yield from facts(value, f"{before}{name}: ")
            else:
                is_text = isinstance(value, str)
                yield (
                    f"{before}{name}",
                    value if is_text else json.dumps(value, ensure_ascii=False),
                )

    table = Table(
        headings=("setting", "value"),
        rows=list(facts(block, "")),
        caption="What the results depend on",
        left=2,
    )
    return Section(title="To make it again", table=table)


def require_reportable() -> None:
    """Raise before a run starts if its page could not be made when it ends."""
    if importlib.util.find_spec("jinja2") is None:
        raise missing_package("report: writing a page", "jinja2")
    require_drawable()


def write_files(folder: Path, contents: Mapping[str, str | bytes]) -> None:
    """Write files into a folder, made where it does not exist; each whole or not at all."""
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        replace_file(folder / name, content)


def write_report(results: Results, folder: str) -> Path:
    """Write page, cells and methods of a run into a folder; the page's path."""
    contents = (as_page(results), as_csv(results), as_markdown(results))
    write_files(Path(folder), dict(zip(FILES, contents, strict=True)))
    return Path(folder) / FILES[0]


def method_table(results: Results) -> Table:
    """A row per method: its score in every column, their mean with its interval, what it cost.

    Where the full cache ran too, the differences from it come after the mean: the relative one,
    and the one of the scores with its interval. Where the loss of the references was taken, its
    mean follows, with its interval and its difference from the full cache. Scores are times 100, or
    say why there is none; those that a paper gives for the model come last. The best of the
    measured scores of each column are bold.
    """
    task, axis, rows = results.task, results.task.axes[0], results.rows
    columns, lines = axis_values(rows, axis), score_lines(rows, axis)
    relative, differences = relative_differences(rows), line_differences(rows, axis)
    has_loss = has_losses(results)
    losses = line_differences(rows, axis, "loss") if has_loss else {}
    headings: tuple[str, ...] = ("vs full", "difference") if differences else ()
    headings += ("loss", "loss 95 %") if has_loss else ()
    headings += ("loss difference",) if losses else ()

    def texts(line: ScoreLine) -> Iterator[str]:
        place = (line.method, line.question)
        yield from place
        yield from (
            IN_PERCENT.text(line.scores[column])
            if column in line.scores
            else line.reasons.get(column, "")
            for column in columns
        )
        yield IN_PERCENT.text(line.mean)
        yield IN_PERCENT.interval(line.interval) if line.intervals else "-"
        if differences:
            yield f"{100 * relative[place]:+.1f} %" if place in relative else "-"
            yield shown_difference(differences.get(place))
        if has_loss:
            yield from _shown_loss(line.loss, line.loss_interval)
        if losses:
            yield shown_difference(losses.get(place), "loss")
        yield shown_bytes(line.held_bytes)
        yield "-" if line.token_ms is None else f"{line.token_ms:.0f}"

    return Table(
        title=f"{task.name}: {task.metric} by {axis}",
        caption=f"95 %: interval of the mean, {METHOD}{_OF_LOSS if has_loss else ''}"
        f"{_left_whole(rows)}",
        headings=(
            *("method", "question", *map(str, columns), "mean", "95 %"),
            *(*headings, "cache", "ms/token"),
        ),
        rows=[tuple(texts(line)) for line in [*lines, *_published(results, columns)]],
        left=2,
        bold=_best(lines, columns),
    )


def has_losses(results: Results) -> bool:
    return any("loss" in row for row in results.rows)


def _left_whole(rows: Sequence[Row]) -> str:
    """Of which methods some prompts were as short as the budget, so that nothing was dropped."""
    asked, whole = Counter[str](), Counter[str]()
    for row in rows:
        if row["policy"]["name"] != FullCache.name and "compressed" in row:  # as in later releases
            asked[row["method"]] += row["samples"]
            whole[row["method"]] += row["samples"] - row["compressed"]
    return "".join(
        f"; {name}: nothing was dropped of {n:,} of {asked[name]:,} prompts"
        for name, n in whole.items()
        if n
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
            reasons={},
        )
        for method, scores in given.items()
    ]


def _best(lines: Sequence[ScoreLine], columns: Sequence[Any]) -> frozenset[tuple[int, int]]:
    """Where a table has the highest of each column; all that look alike.

    A mean over fewer columns than another's is not compared with it.
    """
    most = max((len(line.scores) for line in lines), default=0)
    values = [
        [line.scores.get(column) for column in columns]
        + [line.mean if len(line.scores) == most else None]
        for line in lines
    ]
    found = set()
    for place, column in enumerate(zip(*values, strict=True), 2):
        highest = max((score for score in column if score is not None), default=None)
        found |= {
            (row, place)
            for row, score in enumerate(column)
            if score is not None and IN_PERCENT.text(score) == IN_PERCENT.text(highest)
        }
    return frozenset(found)


def _shown_loss(loss: float | None, interval: Sequence[float] | None) -> tuple[str, str]:
    return IN_NATS.text(loss), "-" if loss is None else IN_NATS.interval(interval)


def cell_table(results: Results) -> list[Row]:
    """A row per method, question and cell, numbers as they were measured."""
    model, more = results.run["model"]["name"], has_losses(results)
    return [
        {"task": row["task"], "metric": row["metric"], "model": model}
        | {"method": row["method"], "question": row["question"], **row["cell"]}
        | {"status": row["status"], "failed": sum(row["failed"].values())}
        | {name: row[name] for name in _NUMBERS}
        | _ends("score", row["interval"])
        | _difference("difference", row["difference"], "score")
        | ({"loss": row["loss"]} | _ends("loss", row["loss_interval"]) if more else {})
        | (_difference("loss_difference", row["loss_difference"], "loss") if more else {})
        for row in results.rows
    ]


def _difference(name: str, found: Row | None, of: str) -> Row:
    given = found or {of: None, "interval": None}
    return {name: given[of]} | _ends(name, given["interval"])


def _ends(name: str, interval: Sequence[float] | None) -> Row:
    low, high = interval or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


def as_csv(results: Results) -> str:
    rows = cell_table(results)
    target = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(target, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return target.getvalue()


def as_markdown(results: Results) -> str:
    table = method_table(results)
    model = escaped(results.run["model"]["name"])
    parts = (f"# {escaped(table.title)}", f"Model: {model}", table.as_markdown())
    return "\n\n".join((*parts, escaped(table.caption))) + "\n"


def as_page(results: Results) -> str:
    task, methods = results.task, method_table(results)
    policies = {f"method {row['method']}": row["policy"] for row in results.rows}
    caption = (
        f"{methods.title}; the best of every column is bold; means are over the columns with a "
        f"score. {methods.caption}"
    )
    failures = _failures(results)
    return as_html(
        f"{task.name} on {results.run['model']['name']}",
        [
            f"{results.run['samples']} samples for every method. Scores are {task.metric} times "
            "100. The cache is what its keys and values take when an answer is complete, the mean."
        ],
        [
            Section(title="Methods", table=replace(methods, caption=caption)),
            Section(title="Figures", figures=list(_pictures(results))),
            *([Section(title="Without an answer", table=failures)] if failures.rows else []),
            Section(title="Cells", table=_cells(results), folded=True),
            facts_section(results.run | policies),
        ],
    )


def _pictures(results: Results) -> Iterator[dict[str, str]]:
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
        yield picture(figure, titles[name], f"{titles[name]} of every method. Means: {means}.")


def _cells(results: Results) -> Table:
    axes = list(dict.fromkeys(name for row in results.rows for name in row["cell"]))
    has_loss = has_losses(results)
    loss = ("loss", "loss 95 %", "loss difference") if has_loss else ()
    headings = ["method", "question", *axes, "score", "95 %", "difference", *loss, "samples"]
    headings += ["prompt tokens", "kept tokens", "cache", "first token", "ms/token"]

    def counted(number: float | None) -> str:
        return "-" if number is None else f"{number:,.0f}"

    def texts(row: Row) -> Iterator[str]:
        yield from (row["method"], row["question"])
        yield from (str(row["cell"].get(axis, "")) for axis in axes)
        is_scored = row["score"] is not None
        yield IN_PERCENT.text(row["score"]) if is_scored else row["status"]
        yield IN_PERCENT.interval(row["interval"]) if is_scored else "-"
        yield shown_difference(row["difference"])
        if has_loss:
            yield from _shown_loss(row["loss"], row["loss_interval"])
            yield shown_difference(row["loss_difference"], "loss")
        yield from (str(row["samples"]), counted(row["prompt_tokens"]))
        yield from (counted(row["kept_tokens"]), shown_bytes(row["held_bytes"]))
        yield from (f"{counted(row['first_token_ms'])} ms", counted(row["token_ms"]))

    return Table(
        headings=headings,
        rows=[tuple(texts(row)) for row in results.rows],
        caption="Means over the samples of a cell, with their intervals; differences are from the "
        "full cache; times are medians",
        left=2,
    )


def _failures(results: Results) -> Table:
    """By method, question and reason: how many samples have no answer, and in which columns."""
    axis = results.task.axes[0]
    found: dict[tuple[str, str, str], Counter[Any]] = {}
    for row in results.rows:
        for reason, count in row["failed"].items():
            columns = found.setdefault((row["method"], row["question"], reason), Counter())
            columns[row["cell"][axis]] += count
    rows = []
    for (method, question, reason), columns in found.items():
        why = f"{reason}: {_REASONS[reason]}" if reason in _REASONS else reason
        where = f"{axis} {', '.join(map(str, columns))}"
        rows.append((method, question, why, str(columns.total()), where))
    headings = ("method", "question", "reason", "samples", "where")
    return Table(headings=headings, rows=rows, caption="These samples are in no mean", left=5)
