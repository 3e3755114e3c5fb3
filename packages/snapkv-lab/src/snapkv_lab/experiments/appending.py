"""Time per token behind as many stored tokens: appended in place, or copied for every token.

    python -m snapkv_lab.experiments appending
        measure, write the rows, render the page (two minutes)

transformers' own cache concatenates what is stored and what is new. Caches are filled directly.
Rows: `docs/results/appending.jsonl`. Page: `docs/results/tables/appending.md`.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from snapkv import SnapKV
from snapkv.app.models import load
from snapkv_lab.experiments.environment import describe_environment
from snapkv_lab.experiments.records import (
    RESULTS,
    TABLES,
    Row,
    environment_line,
    markdown_table,
    measure_or_render,
    tables_page,
)
from snapkv_lab.measure.contenders import Contender, compressed, filled, full
from snapkv_lab.measure.timing import alternate, ratios, spent_on, spread

ROWS = RESULTS / "appending.jsonl"
PAGE = TABLES / "appending.md"

PROMPT_TOKENS, TOKENS = 4096, 96
CELLS = ((1, 512), (1, 1024), (1, 2048), (4, 512), (4, 1024), (4, 2048), (8, 1024))
"""Batch and stored tokens."""


@torch.inference_mode()
def measure(
    model: Any,
    *,
    cells: Sequence[tuple[int, int]] = CELLS,
    prompt_tokens: int = PROMPT_TOKENS,
    tokens: int = TOKENS,
) -> Iterator[Row]:
    """A row per cell; transformers' cache has read a prompt of only what it stores."""
    for batch, stored in cells:
        ours, theirs = compressed("snapkv", SnapKV(stored)), full("transformers")
        work = {
            "snapkv": _decoder(model, ours, batch, prompt_tokens),
            "transformers": _decoder(model, theirs, batch, stored),
        }
        times = alternate(work, rounds=tokens, warmup_rounds=4)
        yield {
            "benchmark": "appending",
            "batch": batch,
            "stored_tokens": stored,
            "prompt_tokens": prompt_tokens,
            "tokens": tokens,
            "ms": spread(times["snapkv"], 2),
            "copying_ms": spread(times["transformers"], 2),
            "ratio": spread(ratios(times["snapkv"], times["transformers"]), 4),
        }


def _decoder(model: Any, contender: Contender, batch: int, seen: int) -> Callable[[], float]:
    cache = filled(contender, model, batch=batch, tokens=seen)
    token = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)

    def step() -> float:
        with contender.at_work(model):
            return spent_on(lambda: model(token, past_key_values=cache)).wall_ms

    return step


def render(rows: list[Row]) -> str:
    """The tables of these rows."""
    lines = [
        [
            str(row["batch"]),
            f"{row['stored_tokens']:,}",
            f"{row['ms']['p50']:.1f}",
            f"{row['copying_ms']['p50']:.1f}",
            f"{row['ratio']['p50']:.3f}",
        ]
        for row in rows
    ]
    header = ["batch", "stored tokens", "in place, ms", "copying, ms", "ratio"]
    table = markdown_table(header, lines)
    return tables_page("appending", "Appending in place", environment_line(rows), table)


def _measurements() -> Iterator[Row]:
    environment, loaded = describe_environment(), load("demo")
    for row in measure(loaded.model):
        print(row, file=sys.stderr)
        yield {**row, "model": loaded.description(), "environment": environment}


if __name__ == "__main__":
    measure_or_render(__doc__, _measurements, render, rows=ROWS, page=PAGE)
