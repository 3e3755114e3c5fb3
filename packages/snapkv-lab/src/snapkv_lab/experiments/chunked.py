"""What is lost where a prompt is read in pieces under a cap, against reading it layer by layer.

    python -m snapkv_lab.experiments chunked  measure, write the rows, render the page (two minutes)
    python -m snapkv_lab.experiments chunked --render   render the page from the rows that are there

The documents are those of the quality benchmark: one magic number in a long text, asked for at its
end. Rows: `docs/results/chunked.jsonl`. Page: `docs/results/tables/chunked.md`.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from snapkv import CompressedCache, SnapKV
from snapkv.app.models import load
from snapkv.prefill import chunked, layer_by_layer
from snapkv_lab.evaluate.haystack import load_haystack
from snapkv_lab.experiments.environment import describe_environment
from snapkv_lab.experiments.magic_number import SEED, Document, make_documents
from snapkv_lab.experiments.records import (
    RESULTS,
    TABLES,
    Row,
    environment_line,
    markdown_table,
    measure_or_render,
    tables_page,
)

ROWS = RESULTS / "chunked.jsonl"
PAGE = TABLES / "chunked.md"

PROMPT_TOKENS, DOCUMENTS, CHUNK_TOKENS = 1024, 8, 128
POLICY = SnapKV(128, window_size=16, kernel_size=13)
CAPS = (None, 768, 512, 256, 128)
"""None reads layer by layer, the exact result that the others are compared with."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """One document, read.

    Attributes:
        kept: (B, Hkv, K) positions, of every layer.
        nll: mean negative log-likelihood of the answer's tokens, in nats.
        right: whether greedy decoding gives the answer.
    """

    kept: Sequence[Tensor]
    nll: float
    right: bool


@torch.inference_mode()
def read(model: Any, document: Document, cap_tokens: int | None, chunk_tokens: int) -> Read:
    """Read a prompt, under a cap or layer by layer, and look at the answer behind it."""
    cache = CompressedCache(model, POLICY)
    pieces: contextlib.AbstractContextManager[None]
    if cap_tokens is None:
        pieces = layer_by_layer(model, chunk_tokens=chunk_tokens)
    else:
        pieces = chunked(model, cap_tokens=cap_tokens, chunk_tokens=chunk_tokens)
    with pieces:
        first = model(
            torch.tensor([document.prompt_ids]), past_key_values=cache, logits_to_keep=1
        ).logits
    kept = [cache.kept_positions(layer) for layer in cache.compressed_layers]
    answer = torch.tensor([document.answer_ids])
    logits = torch.cat([first, model(answer[:, :-1], past_key_values=cache).logits], dim=1)
    chances = logits.log_softmax(dim=-1).gather(2, answer[..., None])
    return Read(
        kept=kept,
        nll=-float(chances.mean()),
        right=bool((logits.argmax(dim=-1) == answer).all()),
    )


def shared_positions(one: Sequence[Tensor], other: Sequence[Tensor], recent_tokens: int) -> float:
    """The part of all kept positions that both keep; the last ones, which all keep, left out."""
    shares = [
        torch.isin(ours, theirs).float().mean()
        for mine, yours in zip(one, other, strict=True)
        for ours, theirs in zip(
            mine[..., :-recent_tokens].flatten(0, 1),
            yours[..., :-recent_tokens].flatten(0, 1),
            strict=True,
        )
    ]
    return float(torch.stack(shares).mean())


def measure(
    model: Any,
    documents: Sequence[Document],
    *,
    caps: Sequence[int | None] = CAPS,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Iterator[Row]:
    """One row per cap; the first of `caps` is None."""
    exact = [read(model, document, None, chunk_tokens) for document in documents]
    for cap in caps:
        reads = exact
        if cap is not None:
            reads = [read(model, document, cap, chunk_tokens) for document in documents]
        shared = [
            shared_positions(ours.kept, theirs.kept, POLICY.window_size)
            for ours, theirs in zip(reads, exact, strict=True)
        ]
        yield {
            "benchmark": "chunked",
            "policy": POLICY.describe(),
            "prompt_tokens": len(documents[0].prompt_ids),
            "chunk_tokens": chunk_tokens,
            "cap_tokens": cap,
            "documents": len(documents),
            "kept_as_exact": round(fmean(shared), 4),
            "answer_nll": round(fmean(each.nll for each in reads), 4),
            "right_answers": sum(each.right for each in reads),
        }


def render(rows: list[Row]) -> str:
    """The tables of these rows."""
    lines = [
        [
            "none" if row["cap_tokens"] is None else f"{row['cap_tokens']:,}",
            f"{row['kept_as_exact']:.0%}",
            f"{row['answer_nll']:.3f}",
            f"{row['right_answers']} of {row['documents']}",
        ]
        for row in rows
    ]
    header = ["cap", "kept as without a cap", "nats per token of the answer", "right answers"]
    table = markdown_table(header, lines)
    return tables_page("chunked", "Reading under a cap", environment_line(rows), table)


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
