"""What is lost where a prompt is read in pieces under a cap, against reading it layer by layer.

The documents are those of the quality benchmark: one magic number in a long text, asked for at its
end.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from snapkv import CompressedCache, SnapKV
from snapkv.prefill import chunked, layer_by_layer
from snapkv_lab.evaluate.haystack import load_haystack
from snapkv_lab.experiments.experiment import Experiment, Given, table
from snapkv_lab.experiments.magic_number import SEED, Document, make_documents
from snapkv_lab.experiments.records import (
    Row,
)

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


def _measured(given: Given) -> Iterator[Row]:
    documents = make_documents(
        given.loaded.tokenizer, load_haystack(), prompt_tokens=PROMPT_TOKENS, count=DOCUMENTS
    )
    return (row | {"seed": SEED} for row in measure(given.loaded.model, documents))


EXPERIMENT = Experiment(
    name="chunked",
    title="Reading under a cap",
    takes="two minutes",
    measure=_measured,
    tables=lambda rows: [
        table(
            rows,
            {
                "cap": lambda row: f"{row['cap_tokens']:,}" if row["cap_tokens"] else "none",
                "kept as without a cap": "{kept_as_exact:.0%}",
                "nats per token of the answer": "{answer_nll:.3f}",
                "right answers": "{right_answers} of {documents}",
            },
        )
    ],
)


if __name__ == "__main__":
    EXPERIMENT.main()
