"""The page of the comparison with stock vLLM, made of nothing but its rows."""

import statistics
from collections.abc import Iterator, Sequence

from snapkv_lab.experiments.records import (
    Row,
    environment_line,
    markdown_table,
    tables_page,
)

BLOCK_TOKENS = 128
ANSWER_TOKENS = 32
ALONE, AT_ONCE = "reading", "reading at once"
"""Parts that read prompts up to their first tokens: one, and several."""
HEADS = "heads of different length"


def render(rows: Sequence[Row]) -> str:
    """The tables of these rows."""
    fast = [row for row in rows if row["part"] == "speed"]
    pools = sorted({row["blocks"] for row in fast})
    first = fast[0]
    header = (
        "blocks",
        "engine",
        "seconds",
        "prefill s",
        "decode s",
        "decode steps",
        "most at once",
        "found",
    )
    pairs = [
        line for row in rows if row["part"] in _PAIRS for line in _pair(row, *_PAIRS[row["part"]])
    ]
    return tables_page(
        "serving",
        "Serving: stock vLLM and compressed prompts",
        environment_line(fast),
        "## The same answers",
        _same(rows),
        f"## {first['requests']} requests of {first['prompt_tokens']:,} tokens at once",
        markdown_table(
            header, [_line(name, blocks, fast) for blocks in pools for name in ("stock", "snapkv")]
        ),
        "## In pairs",
        markdown_table(("work", "other", "snapkv", "ratio", "commit"), pairs),
        "## Blocks held with heads of different length",
        markdown_table(
            ("equal heads", "adakv"),
            [
                [str(row["blocks_held"][name]) for name in ("equal_heads", "adakv")]
                for row in rows
                if row["part"] == HEADS
            ],
        ),
    )


_PAIRS = {
    ALONE: ("reading", "stock", "snapkv", "stock", 1),
    AT_ONCE: ("reading at once", "stock", "snapkv", "stock", 1),
    HEADS: ("a step, equal heads beside adakv", "equal_heads", "adakv", "equal_heads", 1000),
}
"""By part: what is done, the names of the two in its rows, against which, and units in a second."""


def _pair(
    row: Row, work: str, other: str, ours: str, against: str, units: int
) -> Iterator[list[str]]:
    for clock, key in (("", "seconds"), (", processor time", "processor_seconds")):
        ratio = row.get(f"{key.removesuffix('seconds')}against_{against}")
        if ratio is None:
            continue
        times = [units * row[f"{name}_{key}"]["p50"] for name in (other, ours)]
        yield [
            work + clock,
            *(f"{time:.2f} s" if units == 1 else f"{time:.0f} ms" for time in times),
            f"{ratio['p50']:.3f} ({ratio['p20']:.3f} to {ratio['p80']:.3f})",
            row["environment"]["commit"],
        ]


def _same(rows: Sequence[Row]) -> str:
    """Of answers and kept sets, how many are those of stock vLLM, the library, transformers."""
    equal = next(row for row in rows if row["part"] == "budget of the prompt")
    library = next(row for row in rows if row["part"] == "library")
    lines = [
        ("answers, budget of the prompt", "stock vLLM", equal["same_answers"], equal["prompts"]),
        ("kept sets", "the library", library["same_sets"], library["sets"]),
        ("answers", "the library", library["same_answers"], library["prompts"]),
        (
            "stock vLLM's answers",
            "transformers",
            library["stock_like_transformers"],
            library["prompts"],
        ),
    ]
    return markdown_table(
        ("what", "equal to those of", "equal", "of"), [list(map(str, line)) for line in lines]
    )


def _line(name: str, blocks: int, rows: Sequence[Row]) -> list[str]:
    mine = [row for row in rows if row["engine"] == name and row["blocks"] == blocks]

    def median(key: str) -> float:
        return statistics.median(row[key] for row in mine)

    label = name if mine[0]["budget"] is None else f"{name}, budget {mine[0]['budget']}"
    seconds = [f"{median(f'{part}seconds'):.1f}" for part in ("", "prefill_", "decode_")]
    counts = [f"{median(key):.0f}" for key in ("decode_steps", "most_running")]
    return [str(blocks), label, *seconds, *counts, f"{median('needles'):.0f}/{mine[0]['requests']}"]
