"""The tables of the comparison, made of nothing but its rows."""

from itertools import zip_longest
from statistics import fmean

from snapkv.validation import format_bytes
from snapkv_lab.experiments import first_tokens
from snapkv_lab.experiments.contenders import FULL
from snapkv_lab.experiments.records import (
    Row,
    environment_line,
    markdown_table,
    tables_page,
)
from snapkv_lab.experiments.retrieval import Question

MEASURED_LATER = {
    "second reading": "The methods that read twice",
    "r-kv": "R-KV",
    "no question": "LagKV and Compactor",
}
"""Parts whose rows stand in the tables of "quality", and whose they are."""


def render(rows: list[Row]) -> str:
    """The tables of these rows."""
    quality = [row for row in rows if row["part"] == "quality"]
    measured, answered, sections = [environment_line(quality)], quality, []
    for part, who in MEASURED_LATER.items():
        later = [row for row in rows if row["part"] == part]
        answered = answered + later
        if later:
            measured.append(f"{who}: {environment_line(later)}")
    for tokens in sorted({row["prompt_tokens"] for row in quality}):
        sections += _length([row for row in answered if row["prompt_tokens"] == tokens])
    sections += ["## The order of the methods", _order(answered)]
    for part, table in _FURTHER.items():
        if own := [row for row in rows if row["part"] == part]:
            sections += table(own)
            measured.append(f"{part}: {environment_line(own)}")
    title = "Methods side by side, at equal budgets"
    return tables_page("methods", title, "; ".join(measured), *sections)


def mean_nll(rows: list[Row], question: Question) -> dict[str, float]:
    """Each method's NLL, the mean over prompt lengths and budgets, best first."""
    parts = ("quality", *MEASURED_LATER)
    asked = [row for row in rows if row["part"] in parts and row["question"] == question]
    of_method: dict[str, list[float]] = {}
    for row in asked:
        if row["method"] != FULL:
            of_method.setdefault(row["method"], []).append(row["nll"])
    means = {method: fmean(values) for method, values in of_method.items()}
    return dict(sorted(means.items(), key=lambda item: item[1]))


def held_tokens(row: Row) -> float:
    """Tokens per layer and KV head that the bytes held have room for, on average."""
    return float(row["held_bytes"] / row["full_bytes"] * row["read_tokens"])


def _length(rows: list[Row]) -> list[str]:
    """One prompt length: methods by question and budget, and what those without one held."""
    budgets = sorted({row["budget"] for row in rows if row["budget"]})
    columns = [(question, budget) for question in ("visible", "hidden") for budget in budgets]
    cells: dict[str, dict[tuple[str, int | None], Row]] = {}
    for row in rows:
        cells.setdefault(row["method"], {})[row["question"], row["budget"]] = row
    full = cells.pop(FULL)
    snapkv = next(iter(cells.values()))
    table = markdown_table(
        ["method", *(f"{question}, {budget}" for question, budget in columns)],
        [
            ["full cache", *(_cell(full[question, None]) for question, _ in columns)],
            *(
                [name, *(_cell(of[key]) if key in of else "" for key in columns)]
                for name, of in cells.items()
            ),
            ["keys and values held", *(format_bytes(snapkv[key]["held_bytes"]) for key in columns)],
        ],
    )
    tokens, documents = rows[0]["prompt_tokens"], rows[0]["documents"]
    return [
        f"## {tokens:,} tokens, {documents} documents",
        table,
        f"### FastGen, which has no budget, at {tokens:,} tokens",
        _without_budget(rows),
    ]


def _without_budget(rows: list[Row]) -> str:
    """What a method without a budget held."""
    lines = [
        [str(row["budget"]), str(row["policy"]["recovery"]), f"{held_tokens(row):.0f}"]
        for row in rows
        if row["method"] == "FastGen" and row["question"] == "visible"
    ]
    return markdown_table(["in the place of", "recovery", "tokens held"], lines)


def _cell(row: Row) -> str:
    return f"{row['accuracy']:.2f} ({row['nll']:.2f})"


def _order(rows: list[Row]) -> str:
    """The methods from best to worst in both settings."""
    orders = [list(mean_nll(rows, question).items()) for question in ("visible", "hidden")]
    lines = [
        [str(place), *(f"{method}: {nll:.2f}" for method, nll in pair)]
        for place, pair in enumerate(zip_longest(*orders, fillvalue=("", 0.0)), 1)
    ]
    return markdown_table(["place", "question visible", "question hidden"], lines)


def _pooling(rows: list[Row]) -> list[str]:
    """What is built on SnapKV, around the wide kernel."""
    budgets = sorted({row["budget"] for row in rows})
    cells: dict[str, list[str]] = {}
    for row in rows:
        cells.setdefault(row["method"], []).append(_cell(row))
    table = markdown_table(
        ["method, kernel 13", *(f"visible, {budget}" for budget in budgets)],
        [[method, *texts] for method, texts in cells.items()],
    )
    return [f"## Around wide pooling, {rows[0]['prompt_tokens']:,} tokens", table]


def _timing(rows: list[Row]) -> list[str]:
    table = markdown_table(
        ["cache", "keys and values", "held beside them", "ms per token", "against the full cache"],
        [
            [
                row["method"],
                format_bytes(row["held_bytes"]),
                format_bytes(row["index_bytes"]),
                f"{row['ms_per_token']['p50']:.1f}",
                f"{row['against_full']['p50']:.2f} "
                f"({row['against_full']['p20']:.2f} to {row['against_full']['p80']:.2f})",
            ]
            for row in rows
        ],
    )
    return ["## Bytes and time per token", table]


_FURTHER = {"pooling": _pooling, "first tokens": first_tokens.section, "timing": _timing}
"""Parts with tables of their own."""
