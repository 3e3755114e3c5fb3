"""Time and memory: reading a long prompt with compression, and decoding after it.

    python -m snapkv_lab.experiments speed            measure, write the rows, render the page
    python -m snapkv_lab.experiments speed --render   render the page from the rows that are there

Rows: `docs/results/speed.jsonl`. Page: `docs/results/tables/speed.md`.
"""

import sys
from collections.abc import Iterator

from snapkv.app.models import LoadedModel, load
from snapkv.validation import format_bytes
from snapkv_lab.experiments import decode, prefill
from snapkv_lab.experiments.environment import describe_environment
from snapkv_lab.experiments.magic_number import SEED
from snapkv_lab.experiments.peak_memory import measure_peaks
from snapkv_lab.experiments.prompts import prompt_of
from snapkv_lab.experiments.records import (
    RESULTS,
    TABLES,
    Row,
    environment_line,
    markdown_table,
    measure_or_render,
    tables_page,
)

ROWS = RESULTS / "speed.jsonl"
PAGE = TABLES / "speed.md"

_NAMES = {
    "transformers": "transformers' own cache and attention",
    "full": "snapkv, every token kept",
    "snapkv": "snapkv, compressed",
}


def measure() -> Iterator[Row]:
    """All benchmarks, one after the other."""
    environment = describe_environment()
    loaded = load("demo")
    for row in _measurements(loaded):
        print(row, file=sys.stderr)
        yield {**row, "seed": SEED, "model": loaded.description(), "environment": environment}


def _measurements(loaded: LoadedModel) -> Iterator[Row]:
    lengths = (decode.SHORT_TOKENS, decode.LONG_TOKENS)
    yield from decode.measure_decode(loaded.model, {n: prompt_of(loaded, n) for n in lengths})
    yield from prefill.measure_prefill(loaded.model, prompt_of(loaded, prefill.PROMPT_TOKENS))
    yield from measure_peaks()


def render(rows: list[Row]) -> str:
    """The tables of these rows."""
    of = {
        name: [row for row in rows if row["benchmark"] == name]
        for name in ("prefill", "decode", "peak memory")
    }
    return tables_page(
        "speed",
        "Speed and memory",
        environment_line(rows),
        "## Reading a prompt",
        *_prefill_tables(of["prefill"]),
        "## Decoding after a prompt",
        _decode_table(of["decode"]),
        "## Peak memory of reading",
        _peak_table(of["peak memory"]),
    )


def _prefill_tables(rows: list[Row]) -> tuple[str, str]:
    times = [row for row in rows if "ms" in row]
    medians = markdown_table(
        ["cache", "seconds", "processor seconds"],
        [
            [_NAMES[row["cache"]], *(f"{row[unit]['p50'] / 1000:.2f}" for unit in ("ms", "cpu_ms"))]
            for row in times
        ],
    )
    pairs = markdown_table(
        ["pairs", "time", "processor time"],
        [
            [
                f"{_NAMES[row['cache']]} / {_NAMES[row['against']]}",
                _ratio(row["ratio"]),
                _ratio(row["cpu_ratio"]),
            ]
            for row in rows
            if "ratio" in row
        ],
    )
    return medians, pairs


def _decode_table(rows: list[Row]) -> str:
    times = [row for row in rows if "ms_per_token" in row]
    against = {
        (row["cache"], row["prompt_tokens"]): _ratio(row["ratio"]) for row in rows if "ratio" in row
    }
    return markdown_table(
        ["cache", "prompt tokens", "ms per token", "against the short prompt", "bytes held"],
        [
            [
                _NAMES[row["cache"]],
                f"{row['prompt_tokens']:,}",
                f"{row['ms_per_token']['p50']:.1f}",
                against.get((row["cache"], row["prompt_tokens"]), ""),
                format_bytes(row["held_bytes"]),
            ]
            for row in sorted(times, key=lambda row: (row["cache"], row["prompt_tokens"]))
        ],
    )


def _peak_table(rows: list[Row]) -> str:
    return markdown_table(
        ["cache", "prompt tokens", "peak", "after the prompt"],
        [
            [
                _NAMES[row["cache"]],
                f"{row['prompt_tokens']:,}",
                format_bytes(row["peak_growth_bytes"]),
                format_bytes(row["growth_bytes"]),
            ]
            for row in rows
        ],
    )


def _ratio(ratio: dict[str, float]) -> str:
    return f"{ratio['p50']:.3f} ({ratio['p20']:.3f} to {ratio['p80']:.3f})"


if __name__ == "__main__":
    measure_or_render(__doc__, measure, render, rows=ROWS, page=PAGE)
