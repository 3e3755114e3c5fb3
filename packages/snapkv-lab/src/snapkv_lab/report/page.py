"""A page that shows a run: one file without links to others, and its tables beside it."""

import base64
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from snapkv.cache.saving.writing import naming, replace_file
from snapkv.errors import missing_package
from snapkv.validation import format_bytes
from snapkv_lab.drawing import encoded, require_drawable
from snapkv_lab.evaluate.intervals import Difference
from snapkv_lab.evaluate.runner import Results
from snapkv_lab.evaluate.summary import (
    IN_NATS,
    score_lines,
    shown_interval,
    shown_loss,
    shown_score,
)
from snapkv_lab.report import figures
from snapkv_lab.report.score_tables import (
    as_csv,
    as_markdown,
    has_losses,
    method_table,
    shown_difference,
)

FILES = ("index.html", "results.csv", "results.md")
"""What `write_report` writes; the page comes first."""

_REASONS = {
    "too long": "prompt and answer need more positions than the model has",
    "out of memory": "the device had no memory left for it",
}


def require_reportable() -> None:
    """Raise before a run starts if its page could not be made when it ends.

    Raises:
        MissingDependencyError: jinja2 or matplotlib is not installed.
    """
    if importlib.util.find_spec("jinja2") is None:
        raise missing_package("report: writing a page", "jinja2")
    require_drawable()


def write_report(results: Results, folder: str) -> Path:
    """Write the files of a page into a folder, made where it does not exist; the page's path.

    Raises:
        OutputError: they cannot be written.
    """
    target = Path(folder)
    contents = (as_page(results), as_csv(results), as_markdown(results))
    with naming(target):
        target.mkdir(parents=True, exist_ok=True)
    for name, content in zip(FILES, contents, strict=True):
        replace_file(target / name, content)
    return target / FILES[0]


def as_page(results: Results) -> str:
    """The page of a run."""
    return filled(
        "page.html",
        task=results.task,
        model=results.run["model"],
        samples=results.run["samples"],
        methods=method_table(results),
        figures=list(_pictures(results)),
        cells=_cells(results),
        failures=_failures(results),
        facts=_facts(results),
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


def facts_of(block: dict[str, Any]) -> list[tuple[str, str]]:
    """A block of settings as names and texts, what is inside another under both names."""
    return [
        (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for name, value in _flat(block)
    ]


def _pictures(results: Results) -> Iterator[dict[str, str]]:
    """Every figure."""
    lines = score_lines(results.rows, results.task.axes[0])
    means = "; ".join(f"{line.method} ({line.question}) {shown_score(line.mean)}" for line in lines)
    titles = {
        "scores": f"{results.task.metric} by {' and '.join(results.task.axes[:2])}",
        "budgets": f"{results.task.metric} by budget",
        "loss": "loss of the reference",
    }
    for name, figure in figures.draw(results).items():
        yield picture(figure, titles[name], f"{titles[name]} of every method. Means: {means}.")


def _cells(results: Results) -> dict[str, Any]:
    """The table of cells as texts."""
    axes = list(dict.fromkeys(name for row in results.rows for name in row["cell"]))
    costs = ("prompt tokens", "kept tokens", "cache", "first token", "ms/token")
    loss = ("loss", "loss 95 %", "loss difference") if has_losses(results) else ()
    return {
        "headings": [
            *("method", "question", *axes, "score", "95 %", "difference", *loss, "samples"),
            *costs,
        ],
        "rows": [
            [
                row["method"],
                row["question"],
                *(str(row["cell"].get(axis, "")) for axis in axes),
                row["status"] if row["score"] is None else shown_score(row["score"]),
                "-" if row["score"] is None else shown_interval(row["interval"]),
                _shown_difference(row["difference"]),
                *(_shown_losses(row) if loss else ()),
                str(row["samples"]),
                _counted(row["prompt_tokens"]),
                _counted(row["kept_tokens"]),
                "-" if row["held_bytes"] is None else format_bytes(round(row["held_bytes"])),
                f"{_counted(row['first_token_ms'])} ms",
                _counted(row["token_ms"]),
            ]
            for row in results.rows
        ],
    }


def _shown_difference(found: dict[str, Any] | None) -> str:
    """A difference from the full cache as `Difference.describe` gives it."""
    return shown_difference(None if found is None else Difference.read(found))


def _shown_losses(row: dict[str, Any]) -> tuple[str, str, str]:
    """The loss of the references in a cell, its interval and its difference from the full cache."""
    found = row["loss_difference"]
    difference = None if found is None else Difference.read(found, "loss")
    return (
        shown_loss(row["loss"]),
        "-" if row["loss"] is None else shown_interval(row["loss_interval"], IN_NATS),
        shown_difference(difference, IN_NATS),
    )


def _failures(results: Results) -> list[list[str]]:
    """By method, question and reason: how many samples have no answer, and in which columns."""
    axis = results.task.axes[0]
    found: dict[tuple[str, str, str], dict[Any, int]] = {}
    for row in results.rows:
        for reason, count in row["failed"].items():
            columns = found.setdefault((row["method"], row["question"], reason), {})
            columns[row["cell"][axis]] = columns.get(row["cell"][axis], 0) + count
    return [
        [
            method,
            question,
            f"{reason}: {_REASONS[reason]}" if reason in _REASONS else reason,
            str(sum(columns.values())),
            f"{axis} {', '.join(map(str, columns))}",
        ]
        for (method, question, reason), columns in found.items()
    ]


def _facts(results: Results) -> list[tuple[str, str]]:
    """What must be known to make the results again: the run's block, and every method."""
    policies = {f"method {row['method']}": row["policy"] for row in results.rows}
    return facts_of(results.run | policies)


def _flat(block: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in block.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}: ")
        else:
            yield f"{before}{name}", value


def _counted(number: float | None) -> str:
    return "-" if number is None else f"{number:,.0f}"
