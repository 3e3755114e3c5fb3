"""What is promised of a machine with two cores, measured there: ratios of runs that take turns.

    python -m snapkv_lab.experiments flat
        measure, write the rows, render the page (an hour or less)
    python -m snapkv_lab.experiments flat --render    render the page from the rows that are there
    python -m snapkv_lab.experiments flat --small
        short prompts, rows on standard output: does it run?

Decoding time behind prompts of several lengths, against the full cache in batches, what the vote
adds to reading, and memory. To be run with nothing else on the machine. Rows:
`docs/results/flat.jsonl`. Page: `docs/results/tables/flat.md`.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from snapkv import SnapKV
from snapkv.app.models import LoadedModel, load
from snapkv.validation import format_bytes
from snapkv_lab.experiments.decode import decoder
from snapkv_lab.experiments.environment import describe_environment
from snapkv_lab.experiments.magic_number import SEED
from snapkv_lab.experiments.overhead import measure_overhead
from snapkv_lab.experiments.peak_memory import measure_peaks
from snapkv_lab.experiments.prompts import prompt_of
from snapkv_lab.experiments.reading import read_prompt
from snapkv_lab.experiments.records import (
    RESULTS,
    TABLES,
    Row,
    environment_line,
    markdown_table,
    read_rows,
    tables_page,
    write_rows,
)
from snapkv_lab.measure.contenders import compressed, full
from snapkv_lab.measure.decode import DecodeBench
from snapkv_lab.measure.timing import alternate, ratios, spread

ROWS = RESULTS / "flat.jsonl"
PAGE = TABLES / "flat.md"
THREADS = 2
POLICY = SnapKV(512)
_FULL_CACHES = ("transformers", "transformers-static")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured; `SMALL` is the same in a minute."""

    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    flat_tokens: int = 64
    batch: int = 4
    batch_length: int = 8192
    batch_tokens: int = 8
    batch_rounds: int = 7
    overhead_lengths: tuple[int, ...] = (4096, 8192)
    overhead_rounds: int = 5
    peak_length: int = 8192


SMALL = Sizes(
    lengths=(640, 768),
    flat_tokens=2,
    batch=2,
    batch_length=640,
    batch_tokens=1,
    batch_rounds=2,
    overhead_lengths=(640,),
    overhead_rounds=2,
    peak_length=640,
)


def measure(sizes: Sizes) -> Iterator[Row]:
    """All rows, with where they were measured."""
    environment, loaded = describe_environment(), load("demo")
    for row in _measurements(loaded, sizes):
        print(row, file=sys.stderr)
        yield {**row, "seed": SEED, "model": loaded.description(), "environment": environment}


def _measurements(loaded: LoadedModel, sizes: Sizes) -> Iterator[Row]:
    yield from flat_decoding(loaded, sizes)
    yield from full_against_compressed(loaded.model, sizes)
    for length in sizes.overhead_lengths:
        ids = torch.tensor([prompt_of(loaded, length)])
        yield from measure_overhead(loaded.model, ids, POLICY, rounds=sizes.overhead_rounds)
    yield from measure_peaks(sizes.peak_length)


@torch.inference_mode()
def flat_decoding(loaded: LoadedModel, sizes: Sizes) -> Iterator[Row]:
    """Time per token behind real prompts, one token each in turn; ratios to the shortest."""
    decoders: dict[int, Callable[[], float]] = {}
    for length in sizes.lengths:
        prompt = read_prompt(loaded.model, prompt_of(loaded, length))
        decoders[length] = decoder(prompt, prompt.compressed(POLICY))
        prompt.layers.clear()  # the full cache
    named = {str(length): step for length, step in decoders.items()}
    times = alternate(named, rounds=sizes.flat_tokens, warmup_rounds=4)
    base = times[str(sizes.lengths[0])]
    for length in sizes.lengths:
        yield {
            "benchmark": "flat",
            "prompt_tokens": length,
            "budget": POLICY.budget,
            "tokens": sizes.flat_tokens,
            "ms_per_token": spread(times[str(length)], 2),
            "ratio": spread(ratios(times[str(length)], base), 4),
        }


def full_against_compressed(model: Any, sizes: Sizes) -> Iterator[Row]:
    """A batch of long prompts, the caches filled with random keys and values."""
    bench = DecodeBench(
        model=model,
        contenders=[
            compressed("snapkv", POLICY),
            full("transformers"),
            full("transformers-static"),
        ],
        lengths=[sizes.batch_length],
        batches=[sizes.batch],
        tokens=sizes.batch_tokens,
        rounds=sizes.batch_rounds,
    )
    for row in bench.rows():
        yield {"benchmark": "batch", "budget": POLICY.budget, **row}


def render(rows: list[Row]) -> str:
    """The page that these rows make."""
    of = {
        name: [row for row in rows if row["benchmark"] == name]
        for name in ("flat", "batch", "overhead", "peak memory")
    }
    flat, batch = of["flat"][0], of["batch"][0]
    return tables_page(
        "flat",
        "Flat after the prompt",
        environment_line(rows),
        f"## Time per token by length of the prompt, budget {flat['budget']}",
        markdown_table(
            ["prompt tokens", "ms per token", "against the shortest"],
            [
                [
                    f"{row['prompt_tokens']:,}",
                    f"{row['ms_per_token']['p50']:.1f}",
                    _ratio(row["ratio"]),
                ]
                for row in of["flat"]
            ],
        ),
        f"## Against the full cache, {batch['batch']} requests of {batch['length']:,} tokens",
        markdown_table(
            ["cache", "ms per token", "against snapkv", "bytes held"],
            [
                [
                    row["cache"],
                    f"{row['ms_per_token']['p50']:.1f}",
                    _ratio(row["ratio"]),
                    format_bytes(row["held_bytes"]),
                ]
                for row in of["batch"]
            ],
        ),
        "## Vote, selection and gather",
        markdown_table(
            ["prompt tokens", "reading, s", "compressing, ms", "share"],
            [
                [
                    f"{row['prompt_tokens']:,}",
                    f"{row['reading_ms']['p50'] / 1000:.2f}",
                    f"{row['compressing_ms']['p50']:.0f}",
                    f"{row['share']['p50']:.2%}",
                ]
                for row in of["overhead"]
            ],
        ),
        "## Memory",
        markdown_table(
            ["cache", "peak", "held after it"],
            [
                [
                    row["cache"],
                    format_bytes(row["peak_growth_bytes"]),
                    format_bytes(row["held_bytes"]),
                ]
                for row in of["peak memory"]
            ],
        ),
    )


def _ratio(ratio: dict[str, float]) -> str:
    return f"{ratio['p50']:.3f} ({ratio['p20']:.3f} to {ratio['p80']:.3f})"


def main() -> None:
    """Measure unless told only to render."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--render", action="store_true", help="only render the page from the rows")
    parser.add_argument("--small", action="store_true", help="short prompts; nothing is written")
    given = parser.parse_args()
    torch.set_num_threads(THREADS)
    os.environ["OMP_NUM_THREADS"] = str(THREADS)  # of the processes that peaks are measured in
    if given.small:
        for row in measure(SMALL):
            print(json.dumps(row))
        return
    if not given.render:
        write_rows(ROWS, measure(Sizes()))
    PAGE.write_text(render(read_rows(ROWS)), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
