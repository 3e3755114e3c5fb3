"""The numbers of a run as tables: of methods for people, of cells for programs; and as a page.

The page is one file without links to others, with its tables beside it.
"""

import base64
import csv
import html
import importlib.util
import io
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapkv.cache.saving.writing import naming, replace_file
from snapkv.errors import missing_package
from snapkv.policies import FullCache
from snapkv.validation import format_bytes
from snapkv_lab.drawing import encoded, require_drawable
from snapkv_lab.evaluate.intervals import METHOD, Difference, line_differences, relative_differences
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
)
from snapkv_lab.report import figures

FILES = ("index.html", "results.csv", "results.md")
"""What `write_report` writes; the page comes first."""

NONE_SEEN = "no difference seen"
"""What is said of a method where zero lies within the interval of its difference."""

_BEFORE_SCORES = ("method", "question")
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
class MethodTable:
    """A row per method: its score in every column, their mean with its interval, what it cost.

    Where the full cache ran too, the differences from it stand behind the mean: the relative one,
    and the one of the scores with its interval. Where the loss of the references was taken, its
    mean follows, with its interval and its difference from the full cache.
    """

    title: str
    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: frozenset[tuple[int, int]]


def method_table(results: Results) -> MethodTable:
    """The table of a run, by the first axis of its task."""
    task, axis, rows = results.task, results.task.axes[0], results.rows
    columns, lines = axis_values(rows, axis), score_lines(rows, axis)
    relative, differences = relative_differences(rows), line_differences(rows, axis)
    losses = line_differences(rows, axis, "loss") if has_losses(results) else None
    headings = ("vs full", "difference") if differences else ()
    if losses is not None:
        headings += ("loss", "loss 95 %", *(("loss difference",) if losses else ()))

    def compared(line: ScoreLine) -> Iterator[str]:
        place = (line.method, line.question)
        if differences:
            yield f"{100 * relative[place]:+.1f} %" if place in relative else "-"
            yield shown_difference(differences.get(place))
        if losses is not None:
            yield from _shown_loss(line.loss, line.loss_interval)
        if losses:
            yield shown_difference(losses.get(place), IN_NATS)

    def texts(line: ScoreLine) -> tuple[str, ...]:
        return (
            *(line.method, line.question, *map(line.shown, columns)),
            *(IN_PERCENT.text(line.mean), line.shown_interval, *compared(line)),
            _shown_bytes(line.held_bytes),
            "-" if line.token_ms is None else f"{line.token_ms:.0f}",
        )

    return MethodTable(
        title=f"{task.name}: {task.metric} by {axis}",
        caption=f"95 %: interval of the mean, {METHOD}{'' if losses is None else _OF_LOSS}"
        f"{_left_whole(rows)}",
        headings=(
            *(*_BEFORE_SCORES, *map(str, columns), "mean", "95 %"),
            *(*headings, "cache", "ms/token"),
        ),
        rows=tuple(texts(line) for line in [*lines, *_published(results, columns)]),
        best=_best(lines, columns),
    )


def _left_whole(rows: Sequence[Record]) -> str:
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
    none: dict[str, Any] = {"interval": None, "held_bytes": None, "token_ms": None}
    return [
        ScoreLine(
            method=f"paper: {method}",
            question="visible",
            scores={column: scores[column] for column in columns if column in scores},
            intervals={},
            reasons={},
            **none,
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
        and IN_PERCENT.text(score) == IN_PERCENT.text(max(s for s in column if s is not None))
    )


def has_losses(results: Results) -> bool:
    """Whether the loss of the references was taken."""
    return any("loss" in row for row in results.rows)


def shown_difference(difference: Difference | None, scale: Scale = IN_PERCENT) -> str:
    """A difference with its interval, and whether none is seen; a dash for None."""
    if difference is None:
        return "-"
    seen = "" if difference.is_seen or difference.interval is None else f", {NONE_SEEN}"
    interval = shown_interval(difference.interval, scale)
    return f"{scale.text(difference.mean, '+')} ({interval}){seen}"


def _shown_loss(loss: float | None, interval: Sequence[float] | None) -> tuple[str, str]:
    return IN_NATS.text(loss), "-" if loss is None else shown_interval(interval, IN_NATS)


def _shown_bytes(count: float | None) -> str:
    return "-" if count is None else format_bytes(round(count))


def _counted(number: float | None) -> str:
    return "-" if number is None else f"{number:,.0f}"


def cell_table(results: Results) -> list[dict[str, Any]]:
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


def _difference(name: str, found: Record | None, of: str) -> dict[str, float | None]:
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
    """Texts as a table."""
    lines = [[escaped(heading) for heading in headings]]
    lines.append(["---"] * left + ["---:"] * (len(headings) - left))
    for row, texts in enumerate(rows):
        marks = ["**" if (row, column) in bold else "" for column in range(len(texts))]
        lines.append([m + escaped(text) + m for m, text in zip(marks, texts, strict=True)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escaped(text: str) -> str:
    """Text that Markdown takes for nothing else."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|").replace("*", "\\*")


def require_reportable() -> None:
    """Raise before a run starts if its page could not be made when it ends."""
    if importlib.util.find_spec("jinja2") is None:
        raise missing_package("report: writing a page", "jinja2")
    require_drawable()


def write_report(results: Results, folder: str) -> Path:
    """Write the files of a page into a folder, made where it does not exist; the page's path."""
    contents = (as_page(results), as_csv(results), as_markdown(results))
    return write_files(Path(folder), dict(zip(FILES, contents, strict=True))) / FILES[0]


def write_files(folder: Path, contents: Mapping[str, str | bytes]) -> Path:
    """Write files into a folder, made where it does not exist; each whole or not at all."""
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        replace_file(folder / name, content)
    return folder


def as_page(results: Results) -> str:
    """The page of a run."""
    policies = {f"method {row['method']}": row["policy"] for row in results.rows}
    return filled(
        "page.html",
        task=results.task,
        model=results.run["model"],
        samples=results.run["samples"],
        methods=method_table(results),
        figures=list(_pictures(results)),
        cells=_cells(results),
        failures=_failures(results),
        facts=facts_of(results.run | policies),
    )


def filled(template: str, **values: Any) -> str:
    """A page out of a template of this folder: everything that is not markup is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(values)


def picture(figure: Any, title: str, alt: str) -> dict[str, str]:
    """A figure inside a page, with its text for those who do not see it."""
    data = base64.b64encode(encoded(figure, ".svg")).decode()
    return {"title": title, "alt": alt, "source": f"data:image/svg+xml;base64,{data}"}


def facts_of(block: dict[str, Any], before: str = "") -> list[tuple[str, str]]:
    """A block of settings as names and texts, what is inside another under both names."""
    facts: list[tuple[str, str]] = []
    for name, value in block.items():
        if isinstance(value, dict):
            facts += facts_of(value, f"{before}{name}: ")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            facts.append((f"{before}{name}", text))
    return facts


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


def _cells(results: Results) -> dict[str, Any]:
    axes = list(dict.fromkeys(name for row in results.rows for name in row["cell"]))
    loss = ("loss", "loss 95 %", "loss difference") if has_losses(results) else ()
    headings = [*_BEFORE_SCORES, *axes, "score", "95 %", "difference", *loss, "samples"]
    headings += ["prompt tokens", "kept tokens", "cache", "first token", "ms/token"]

    def texts(row: Record) -> Iterator[str]:
        yield from (row["method"], row["question"])
        yield from (str(row["cell"].get(axis, "")) for axis in axes)
        is_scored = row["score"] is not None
        yield IN_PERCENT.text(row["score"]) if is_scored else row["status"]
        yield shown_interval(row["interval"]) if is_scored else "-"
        yield shown_difference(row["difference"] and Difference.read(row["difference"]))
        if loss:
            yield from _shown_loss(row["loss"], row["loss_interval"])
            found = row["loss_difference"]
            yield shown_difference(found and Difference.read(found, "loss"), IN_NATS)
        yield str(row["samples"])
        yield from (_counted(row["prompt_tokens"]), _counted(row["kept_tokens"]))
        yield _shown_bytes(row["held_bytes"])
        yield f"{_counted(row['first_token_ms'])} ms"
        yield _counted(row["token_ms"])

    return {"headings": headings, "rows": [list(texts(row)) for row in results.rows]}


def _failures(results: Results) -> list[list[str]]:
    """By method, question and reason: how many samples have no answer, and in which columns."""
    axis = results.task.axes[0]
    found: dict[tuple[str, str, str], Counter[Any]] = {}
    for row in results.rows:
        for reason, count in row["failed"].items():
            columns = found.setdefault((row["method"], row["question"], reason), Counter())
            columns[row["cell"][axis]] += count
    return [
        [
            method,
            question,
            f"{reason}: {_REASONS[reason]}" if reason in _REASONS else reason,
            str(columns.total()),
            f"{axis} {', '.join(map(str, columns))}",
        ]
        for (method, question, reason), columns in found.items()
    ]
