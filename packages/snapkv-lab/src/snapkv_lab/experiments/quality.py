"""Quality of every method on the retrieval task, at several budgets and prompt lengths.

    python -m snapkv_lab.experiments quality            measure, write the rows, render the page
    python -m snapkv_lab.experiments quality --render   render the page from the rows that are there

Rows: `docs/results/quality.jsonl`. Page: `docs/results/tables/quality.md`.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict

from snapkv import FullCache, Random, SnapKV
from snapkv.app.models import LoadedModel, load
from snapkv.policies import Policy
from snapkv.validation import format_bytes
from snapkv_lab.evaluate.haystack import load_haystack
from snapkv_lab.experiments.environment import describe_environment
from snapkv_lab.experiments.magic_number import SEED, make_documents
from snapkv_lab.experiments.records import (
    RESULTS,
    TABLES,
    Row,
    environment_line,
    markdown_table,
    measure_or_render,
    tables_page,
)
from snapkv_lab.experiments.retrieval import Outcome, measure_retrieval
from snapkv_lab.experiments.sinks_and_recent import SinksAndRecent

ROWS = RESULTS / "quality.jsonl"
PAGE = TABLES / "quality.md"

DOCUMENTS = {768: 24, 2048: 12, 4096: 8}
"""How many documents are read at each prompt length."""

BUDGETS = (96, 128, 256, 512)


def policies_at(budget: int) -> list[Policy]:
    """Every method of the comparison at one budget."""
    windows_and_kernels = [(window, kernel) for window in (16, 32) for kernel in (1, 5, 7, 13)]
    maxima = [
        SnapKV(budget, window_size=window, kernel_size=kernel)
        for window, kernel in windows_and_kernels
    ]
    averages = [
        SnapKV(budget, window_size=16, kernel_size=kernel, pooling="avg") for kernel in (5, 7, 13)
    ]
    return [
        *maxima,
        *averages,
        SinksAndRecent(budget, window_size=16),
        Random(budget, window_size=16),
    ]


def measure() -> Iterator[Row]:
    """Read and answer all documents, shortest prompts first."""
    loaded, haystack = load("demo"), load_haystack()
    environment = describe_environment()
    policies = [FullCache(), *(policy for budget in BUDGETS for policy in policies_at(budget))]
    for prompt_tokens, count in DOCUMENTS.items():
        print(f"{count} documents of {prompt_tokens} tokens", file=sys.stderr)
        documents = make_documents(
            loaded.tokenizer, haystack, prompt_tokens=prompt_tokens, count=count
        )
        task = {
            "task": "magic number",
            "haystack": haystack.name,
            "prompt_tokens": prompt_tokens,
            "seed": SEED,
        }
        for outcome in measure_retrieval(loaded.model, documents, policies):
            yield {**task, **_outcome_row(outcome, loaded), "environment": environment}


def _outcome_row(outcome: Outcome, loaded: LoadedModel) -> Row:
    return {
        "policy": outcome.policy.name,
        "settings": asdict(outcome.policy),
        "documents": outcome.documents,
        "accuracy": round(outcome.accuracy, 4),
        "nll": round(outcome.nll, 4),
        "held_bytes": outcome.held_bytes,
        "full_bytes": outcome.full_bytes,
        "model": loaded.description(),
    }


def render(rows: list[Row]) -> str:
    """The tables of these rows."""
    lengths = sorted({row["prompt_tokens"] for row in rows})
    sections = [_section([row for row in rows if row["prompt_tokens"] == n]) for n in lengths]
    title = "One magic number in a long text"
    return tables_page("quality", title, environment_line(rows), *sections)


def _section(rows: list[Row]) -> str:
    """One prompt length: methods by budgets, the full cache first."""
    full = next(row for row in rows if row["policy"] == "full")
    compressed = [row for row in rows if row["policy"] != "full"]
    budgets = sorted({row["settings"]["budget"] for row in compressed})
    cells: dict[str, dict[int, str]] = {}
    for row in compressed:
        cells.setdefault(_label(row), {})[row["settings"]["budget"]] = _cell(row)
    held = {row["settings"]["budget"]: format_bytes(row["held_bytes"]) for row in compressed}
    table = markdown_table(
        ["method", *(f"budget {budget}" for budget in budgets)],
        [
            ["full cache", *[_cell(full)] * len(budgets)],
            *([label, *(cells[label][budget] for budget in budgets)] for label in cells),
            ["keys and values held", *(held[budget] for budget in budgets)],
            ["of the full cache", *[format_bytes(full["full_bytes"])] * len(budgets)],
        ],
    )
    tokens, documents = rows[0]["prompt_tokens"], rows[0]["documents"]
    return f"## {tokens:,} tokens, {documents} documents\n\n{table}"


def _cell(row: Row) -> str:
    return f"{row['accuracy']:.2f} ({row['nll']:.2f})"


def _label(row: Row) -> str:
    settings = row["settings"]
    if row["policy"] == "random":
        return "random"
    if row["policy"] == "sinks_and_recent":
        return "sinks and recent"
    window = f"SnapKV, window {settings['window_size']}"
    if settings["kernel_size"] == 1:
        return f"{window}, no pooling"
    kind = "max" if settings["pooling"] == "max" else "average"
    return f"{window}, {kind} {settings['kernel_size']}"


if __name__ == "__main__":
    measure_or_render(__doc__, measure, render, rows=ROWS, page=PAGE)
