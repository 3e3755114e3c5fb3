"""The page of `snapkv_lab.experiments.selective`, from its rows alone."""

from collections.abc import Sequence

from snapkv_lab.experiments.records import (
    RESULTS,
    TABLES,
    Row,
    environment_line,
    markdown_table,
    tables_page,
)

ROWS = RESULTS / "selective.jsonl"
PAGE = TABLES / "selective.md"


def render(rows: list[Row]) -> str:
    """The tables of these rows."""
    parts = {name: [row for row in rows if row["part"] == name] for name in _SECTIONS}
    shown = {name: own for name, own in parts.items() if own}
    sections = [part for name, own in shown.items() for part in _SECTIONS[name](own)]
    measured = "; ".join(dict.fromkeys(environment_line(own) for own in shown.values()))
    title = "Reading fewer tokens in the upper half of the model"
    return tables_page("selective", title, measured, *sections)


def _time(rows: list[Row]) -> list[str]:
    return _timed("Time on the demo model", rows)


def _shape(rows: list[Row]) -> list[str]:
    tokens, layers = rows[0]["prompt_tokens"], rows[0]["model"]["layers"]
    return _timed(f"Time at {tokens:,} tokens, {layers} layers of random weights", rows)


def _timed(title: str, rows: list[Row]) -> list[str]:
    lines = [[_label(row), f"{row['ms']['p50'] / 1000:.2f}", _ratio(row)] for row in rows]
    return [f"## {title}", markdown_table(["reading", "seconds", "of the exact time"], lines)]


def _quality(rows: list[Row]) -> list[str]:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    labels = list(dict.fromkeys(_label(row) for row in rows))
    cells = {(_label(row), row["task"]): _cell(row) for row in rows}
    table = markdown_table(
        ["reading", *tasks, "all"],
        [
            [label, *(cells[label, task] for task in tasks), f"{_share(rows, label):.2f}"]
            for label in labels
        ],
    )
    return ["## Right answers", table]


def _share(rows: Sequence[Row], label: str) -> float:
    own = [row for row in rows if _label(row) == label]
    return float(sum(row["right"] for row in own) / sum(row["prompts"] for row in own))


def _label(row: Row) -> str:
    prefill = row["prefill"]
    if prefill["name"] == "exact":
        return "exact"
    return f"{prefill['name']}, {prefill['layer']}, {prefill['keep_ratio']:.0%}"


def _ratio(row: Row) -> str:
    ratio = row["ratio"]
    if row["prefill"]["name"] == "exact":
        return "1.00"
    return f"{ratio['p50']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"


def _cell(row: Row) -> str:
    return f"{row['right'] / row['prompts']:.2f} ({row['loss']:.3f})"


_SECTIONS = {"time": _time, "shape": _shape, "quality": _quality}
