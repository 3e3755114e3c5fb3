"""JSON rows on disk, and Markdown pages made of nothing but rows."""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[5] / "docs" / "results"
TABLES = RESULTS / "tables"

Row = dict[str, Any]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replace the file by these rows, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_rows(path: Path) -> list[Row]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def measure_or_render(
    doc: str | None,
    measure: Callable[[], Iterable[Row]],
    render: Callable[[list[Row]], str],
    *,
    rows: Path,
    page: Path,
) -> None:
    """What a benchmark does when it is run: measure, unless told only to render its page.

    Args:
        doc: the benchmark's docstring, whose first line describes it.
        measure: gives the rows.
        render: makes the page of them.
        rows: where they are.
        page: where it is.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--render", action="store_true", help="only render the page from the rows")
    if not parser.parse_args().render:
        write_rows(rows, measure())
    write_page(render, rows=rows, page=page)


def write_page(render: Callable[[list[Row]], str], *, rows: Path, page: Path) -> None:
    """Make the page of the rows that are there, and show it."""
    page.write_text(render(read_rows(rows)), encoding="utf-8")
    print(page.read_text(encoding="utf-8"))


def between(page: str, begin: str, end: str, content: str) -> str:
    """The page with this content between two marks, which stay."""
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return before + begin + content + end + after


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first column is left-aligned, numbers stand on the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, rule, *rows])


def tables_page(benchmark: str, title: str, measured: str, *parts: str) -> str:
    """A page of headings and tables, which says what made it of which rows.

    Args:
        benchmark: the module, and the name of its rows.
        title: the first heading.
        measured: on what; see `environment_line`.
        parts: further headings, and tables.
    """
    made = f"Made by `python -m snapkv_lab.experiments.{benchmark}`. {measured}."
    return "\n\n".join([f"# {title}", made, *parts]) + "\n"


def environment_line(rows: Sequence[Row]) -> str:
    """What the rows say about model, software and machine; they must agree."""
    models = {json.dumps(row["model"]) for row in rows}
    environments = {json.dumps(row["environment"]) for row in rows}
    if len(models) != 1 or len(environments) != 1:
        raise ValueError("expected rows of one run, got several models or environments")
    model, environment = rows[0]["model"], rows[0]["environment"]
    vllm = f"vLLM {environment['vllm']}, " if environment.get("vllm") else ""
    return (
        f"Measured on {model['name']} ({model['dtype']}, {model['attn_implementation']}, "
        f"{model['device']}), {environment['processor']}, {environment['threads']} threads, "
        f"torch {environment['torch']}, transformers {environment['transformers']}, "
        f"{vllm}commit {environment['commit']}"
    )
