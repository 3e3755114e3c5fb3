"""JSON rows on disk, and Markdown pages made of nothing but rows."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "docs" / "results"

Row = dict[str, Any]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replace the file by these rows, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_rows(path: Path) -> list[Row]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first column is left-aligned, numbers stand on the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, rule, *rows])


def environment_line(rows: Sequence[Row]) -> str:
    """What the rows say about model, software and machine; they must agree."""
    models = {json.dumps(row["model"]) for row in rows}
    environments = {json.dumps(row["environment"]) for row in rows}
    if len(models) != 1 or len(environments) != 1:
        raise ValueError("expected rows of one run, got several models or environments")
    model, environment = rows[0]["model"], rows[0]["environment"]
    return (
        f"Measured on {model['name']} ({model['dtype']}, {model['attn_implementation']}, "
        f"{model['device']}), {environment['processor']}, {environment['threads']} threads, "
        f"torch {environment['torch']}, transformers {environment['transformers']}, "
        f"commit {environment['commit']}"
    )
