"""Few bits for what is kept: right answers, bytes and time per token, with eviction and without.

    python -m snapkv_lab.experiments bits  measure, write the rows, render the page (three minutes)
    python -m snapkv_lab.experiments bits --render   render the page from the rows that are there

The documents are those of the quality benchmark: one magic number in a long text, asked for at its
end. Rows: `docs/results/bits.jsonl`. Page: `docs/results/tables/bits.md`.
"""

import sys
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import torch

from snapkv import FullCache, SnapKV
from snapkv.app.models import load
from snapkv.policies import Policy
from snapkv.validation import format_bytes
from snapkv_lab.evaluate.haystack import load_haystack
from snapkv_lab.experiments.decode import decoder
from snapkv_lab.experiments.environment import describe_environment
from snapkv_lab.experiments.magic_number import SEED, Document, make_documents
from snapkv_lab.experiments.reading import ReadPrompt, read_prompt
from snapkv_lab.experiments.records import (
    RESULTS,
    TABLES,
    Row,
    environment_line,
    markdown_table,
    measure_or_render,
    tables_page,
)
from snapkv_lab.experiments.scoring import score_answer
from snapkv_lab.measure.timing import alternate, ratios, spread

ROWS = RESULTS / "bits.jsonl"
PAGE = TABLES / "bits.md"

PROMPT_TOKENS, DOCUMENTS, BUDGET, TIMED_TOKENS = 2048, 8, 512, 48
BITS = (None, "int8", "fp8", "int4")


def policies(budget: int) -> dict[str, Policy]:
    """Without eviction, and with it."""
    return {"full cache": FullCache(), "SnapKV": SnapKV(budget, window_size=16, kernel_size=13)}


@torch.inference_mode()
def measure(
    model: Any, documents: Sequence[Document], *, budget: int = BUDGET, tokens: int = TIMED_TOKENS
) -> Iterator[Row]:
    """A row per policy and kind of bits; times are of the last document."""
    cells = [(name, policy, bits) for name, policy in policies(budget).items() for bits in BITS]
    scores: list[list[Any]] = [[] for _ in cells]
    for document in documents:
        prompt = read_prompt(model, document.prompt_ids)
        for (_, policy, bits), of_cell in zip(cells, scores, strict=True):
            cache = prompt.compressed(policy, quantize=bits)
            held = cache.report().held_bytes
            of_cell.append((score_answer(prompt, cache, document.answer_ids), held))
    times = _times(prompt, cells, tokens)
    for (name, policy, bits), of_cell in zip(cells, scores, strict=True):
        yield {
            "benchmark": "bits",
            "cache": name,
            "bits": bits,
            "policy": policy.describe(),
            "prompt_tokens": len(documents[0].prompt_ids),
            "documents": len(documents),
            "right_answers": sum(score.right for score, _ in of_cell),
            "nll": round(fmean(score.nll for score, _ in of_cell), 4),
            "held_bytes": round(fmean(held for _, held in of_cell)),
            "tokens": tokens,
            "ms_per_token": spread(times[name, bits], 2),
            "against_whole": spread(ratios(times[name, bits], times[name, None]), 4),
        }


def _times(
    prompt: ReadPrompt, cells: Sequence[tuple[str, Policy, Any]], tokens: int
) -> dict[tuple[str, Any], list[float]]:
    decoders = {
        (name, bits): decoder(prompt, prompt.compressed(policy, quantize=bits))
        for name, policy, bits in cells
    }
    return alternate(decoders, rounds=tokens, warmup_rounds=4)


def render(rows: list[Row]) -> str:
    """The tables of these rows."""
    lines = [
        [
            f"{row['cache']}, {row['bits'] or row['model']['dtype']}",
            format_bytes(row["held_bytes"]),
            f"{row['right_answers']} of {row['documents']} ({row['nll']:.2f})",
            f"{row['ms_per_token']['p50']:.1f}",
            f"{row['against_whole']['p50']:.2f}",
        ]
        for row in rows
    ]
    header = ["cache", "held", "right answers", "ms per token", "against its own dtype"]
    table = markdown_table(header, lines)
    return tables_page("bits", "Few bits for what is kept", environment_line(rows), table)


def _measurements() -> Iterator[Row]:
    environment, loaded = describe_environment(), load("demo")
    documents = make_documents(
        loaded.tokenizer, load_haystack(), prompt_tokens=PROMPT_TOKENS, count=DOCUMENTS
    )
    for row in measure(loaded.model, documents):
        print(row, file=sys.stderr)
        yield {**row, "seed": SEED, "model": loaded.description(), "environment": environment}


if __name__ == "__main__":
    measure_or_render(__doc__, _measurements, render, rows=ROWS, page=PAGE)
