"""JSON rows on disk, and Markdown pages made of nothing but rows."""

import json
from collections.abc import Iterable, Sequence
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


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Add rows that belong together, at once, so that none of them is left half written."""
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    with path.open("a", buffering=1 << 20, encoding="utf-8") as file:
        file.write(text)


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
