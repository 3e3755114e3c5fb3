"""The table of docs/planning.md: the paper's models, planned from their shapes.

python -m snapkv_lab.experiments plans    put the table into docs/planning.md
"""

from pathlib import Path

import torch

from snapkv.plan import Plan, Request, footprint_of, shapes
from snapkv.validation import format_bytes
from snapkv_lab.experiments.records import between, markdown_table

PAGE = Path(__file__).parents[5] / "docs/planning.md"
BEGIN, END = "<!-- planned: python -m snapkv_lab.experiments plans -->\n", "<!-- /planned -->\n"
_MODELS = ("lwm-7b", "longchat-7b", "mistral-7b", "mixtral-8x7b", "command-r-35b")


def table() -> str:
    """Bytes and speed-ups of every model."""
    header = ["model", "weights", "full cache", "compressed", "decoding, at most", "batch of 8"]
    rows = []
    for name in _MODELS:
        footprint = footprint_of(shapes.outline(name, dtype=torch.bfloat16))
        alone, many = (
            Plan(
                model=name,
                footprint=footprint,
                request=Request(context_tokens=128_000, batch=batch),
            )
            for batch in (1, 8)
        )
        rows.append(
            [
                name,
                format_bytes(footprint.weights_bytes),
                format_bytes(alone.full.cache_bytes),
                format_bytes(alone.compressed.cache_bytes),
                f"{alone.decode_speedup:.1f}x",
                f"{many.decode_speedup:.1f}x",
            ]
        )
    return f"\n{markdown_table(header, rows)}\n\n"


def filled(page: str) -> str:
    """The page with the table between its marks."""
    return between(page, BEGIN, END, table())


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
