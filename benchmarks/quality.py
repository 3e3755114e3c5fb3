"""Quality of every method on the retrieval task, at several budgets and prompt lengths.

    python -m benchmarks.quality            measure, write the rows, render the page
    python -m benchmarks.quality --render   render the page from the rows that are there

Rows: `docs/results/quality.jsonl`. Page: `docs/results/quality.md`.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict

from benchmarks.environment import describe_environment
from benchmarks.magic_number import SEED, make_documents
from benchmarks.records import RESULTS, Row, environment_line, markdown_table, measure_or_render
from benchmarks.retrieval import Outcome, measure_retrieval
from benchmarks.sinks_and_recent import SinksAndRecent
from snapkv import FullCache, Random, SnapKV
from snapkv.app.models import LoadedModel, load
from snapkv.lab.evaluate.haystack import load_haystack
from snapkv.policies import Policy
from snapkv.validation import format_bytes

ROWS = RESULTS / "quality.jsonl"
PAGE = RESULTS / "quality.md"

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
    """The page that these rows make."""
    lengths = sorted({row["prompt_tokens"] for row in rows})
    sections = [_section([row for row in rows if row["prompt_tokens"] == n]) for n in lengths]
    return "\n\n".join([_HEAD, environment_line(rows) + ".", *sections]) + "\n"


_HEAD = """\
# Quality: one magic number in a long text

"Special magic number for CITY is NNNN" stands at depth 0.1, 0.3, 0.5 or 0.7 of a text, and the
prompt ends in "Answer: The special magic number for CITY is". Every document is read once with
the full cache; each method then compresses a copy of it, and the right answer is fed to the model
token by token.

A cell is the fraction of documents whose answer was right in every token, and in brackets the mean
over documents of the negative log-likelihood of the answer after its first token, in nats, which
changes smoothly where the fraction jumps. With n documents one document is 1/n: small differences
between cells mean nothing. A budget counts tokens per KV head and layer, window included.
"Sinks and recent" keeps the first 4 tokens and the last ones, as StreamingLLM does.

Rendered from `quality.jsonl` by `python -m benchmarks.quality`; each row has all settings."""


def _section(rows: list[Row]) -> str:
    """One prompt length: a line about the full cache and a table of methods by budgets."""
    first = rows[0]
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
            *([label, *(cells[label][budget] for budget in budgets)] for label in cells),
            ["keys and values held", *(held[budget] for budget in budgets)],
        ],
    )
    return (
        f"## {first['prompt_tokens']:,} tokens\n\n"
        f"{first['haystack']}, {first['documents']} documents, seed {first['seed']}. "
        f"The full cache: {_cell(full)}, {format_bytes(full['full_bytes'])}.\n\n{table}"
    )


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
