"""One magic number in a long text: what finds it at which budget.

`quality`: SnapKV's windows and kernels. `bits`: few bits for what is kept, with eviction and
without. `chunked`: reading in pieces under a cap, against reading layer by layer.
"""

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor

from snapkv import CompressedCache, FullCache, Random, SnapKV
from snapkv.policies import Policy, PrefixPolicy, PromptLayer
from snapkv.prefill import chunked, layer_by_layer
from snapkv_lab.evaluate.haystack import load_haystack
from snapkv_lab.experiments.experiment import Experiment, Given, Sized
from snapkv_lab.experiments.pages import Pivot, Table, cell
from snapkv_lab.experiments.prompts import (
    SEED,
    Document,
    read_prompt,
    retrieved,
    score_answer,
)
from snapkv_lab.experiments.records import Row, grouped


@dataclass(frozen=True)
class SinksAndRecent(PrefixPolicy):
    """Keeps the first `sink_tokens` of the prompt and fills the budget with the most recent.

    Only the selection is StreamingLLM's: positions stay true here, where StreamingLLM counts them
    inside its cache, and the tokens generated after the prompt are all kept.
    """

    name: ClassVar[str] = "sinks_and_recent"

    _: KW_ONLY
    sink_tokens: int = 4

    @property
    def query_tokens(self) -> int:
        return 0

    def score(self, layer: PromptLayer) -> Tensor:
        """Later is better: (B, Hkv, P) float32."""
        batch, heads, prompt_tokens, _ = layer.keys.shape
        columns = torch.arange(prompt_tokens - self.window_size, device=layer.keys.device)
        return columns.float().expand(batch, heads, -1)


def policies_at(budget: int) -> list[Policy]:
    return [
        *(
            SnapKV(budget, window_size=window, kernel_size=kernel)
            for window in (16, 32)
            for kernel in (1, 5, 7, 13)
        ),
        *(
            SnapKV(budget, window_size=16, kernel_size=kernel, pooling="avg")
            for kernel in (5, 7, 13)
        ),
        SinksAndRecent(budget, window_size=16),
        Random(budget, window_size=16),
    ]


def _quality(given: Given) -> Iterator[Row]:
    policies = [FullCache(), *(each for budget in given.budgets for each in policies_at(budget))]
    for tokens, count in given.documents_of.items():
        print(f"{count} documents of {tokens} tokens", file=sys.stderr)
        outcomes = retrieved(given.loaded.model, given.documents(tokens, count), policies)
        for policy, outcome in zip(policies, outcomes, strict=True):
            found = {key: each for key, each in outcome.items() if key not in _LEFT_OUT}
            yield {
                "task": "magic number",
                "haystack": load_haystack().name,
                "prompt_tokens": tokens,
                "policy": policy.name,
                "settings": asdict(policy),
                **found,
            }


_LEFT_OUT = ("read_tokens", "end_bytes")


def _quality_tables(rows: list[Row]) -> Iterator[str]:
    """For each prompt length methods by budgets, the full cache first."""
    by = Pivot("method", "{label}", "budget {settings[budget]}", "{cell}")
    for tokens, own in sorted(grouped(rows, "prompt_tokens").items()):
        title = f"{tokens:,} tokens, {own[0]['documents']} documents"
        yield from Table(by, title, made=_with_full).parts(own)


def _with_full(rows: list[Row]) -> Iterable[Row]:
    full, *others = sorted(rows, key=lambda row: row["policy"] != "full")
    score, size = "{accuracy:.2f} ({nll:.2f})", "{held_bytes:bytes}"
    for row in others:
        yield row | {"label": "full cache", "cell": cell(score, full)}
    for row in others:
        yield row | {"label": _label(row), "cell": cell(score, row)}
    for label, of_row in (("keys and values held", None), ("of the full cache", full)):
        for row in others:
            yield row | {"label": label, "cell": cell(size, of_row or row)}


def _label(row: Row) -> str:
    settings = row["settings"]
    if row["policy"] in ("random", "sinks_and_recent"):
        return str(row["policy"]).replace("_", " ")
    window = f"SnapKV, window {settings['window_size']}"
    if settings["kernel_size"] == 1:
        return f"{window}, no pooling"
    kind = "max" if settings["pooling"] == "max" else "average"
    return f"{window}, {kind} {settings['kernel_size']}"


QUALITY = Experiment(
    name="quality",
    title="One magic number in a long text",
    measure=_quality,
    options={
        "budgets": Sized((96, 128, 256, 512), (48,)),
        "documents_of": Sized({768: 24, 2048: 12, 4096: 8}, {128: 1}),
    },
    fields={"seed": SEED},
    tables=_quality_tables,
)

BITS = (None, "int8", "fp8", "int4")


@torch.inference_mode()
def _bits(given: Given) -> Iterator[Row]:
    """A row per policy and kind of bits."""
    wide = SnapKV(given.budget, window_size=16, kernel_size=13)
    cells = [
        (name, policy, bits)
        for name, policy in (("full cache", FullCache()), ("SnapKV", wide))
        for bits in BITS
    ]
    scores: dict[Any, list[Any]] = {key: [] for key in cells}
    for document in given.documents(given.tokens, given.count):
        prompt = read_prompt(given.loaded.model, document.prompt_ids)
        for key in cells:
            cache = prompt.compressed(key[1], quantize=key[2])
            held = cache.report().held_bytes
            scores[key].append((score_answer(prompt, cache, document.answer_ids), held))
    for key, own in scores.items():
        name, policy, bits = key
        yield {
            "benchmark": "bits",
            "cache": name,
            "bits": bits,
            "policy": policy.describe(),
            "prompt_tokens": given.tokens,
            "documents": len(own),
            "right_answers": sum(score.right for score, _ in own),
            "nll": round(fmean(score.nll for score, _ in own), 4),
            "held_bytes": round(fmean(held for _, held in own)),
        }


FEW_BITS = Experiment(
    name="bits",
    title="Few bits for what is kept",
    takes="three minutes",
    measure=_bits,
    options={
        "tokens": Sized(2048, 128),
        "count": Sized(8, 1),
        "budget": Sized(512, 96),
    },
    fields={"seed": SEED},
    tables=[
        Table(
            {
                "cache": lambda row: f"{row['cache']}, {row['bits'] or row['model']['dtype']}",
                "held": "{held_bytes:bytes}",
                "right answers": "{right_answers} of {documents} ({nll:.2f})",
            }
        )
    ],
)

CAPPED = SnapKV(128, window_size=16, kernel_size=13)
CAPS = (None, 768, 512, 256, 128)
"""None reads layer by layer, the exact result that the others are compared with."""


@torch.inference_mode()
def read_in_pieces(
    model: Any, document: Document, policy: Policy, cap: int | None, chunk: int
) -> tuple[list[Tensor], float, bool]:
    """Read a prompt, under a cap or layer by layer, and look at the answer behind it.

    The positions that are kept, (B, Hkv, K) of every layer; the mean negative log-likelihood of the
    answer's tokens, in nats; whether greedy decoding gives the answer.
    """
    cache = CompressedCache(model, policy)
    pieces: contextlib.AbstractContextManager[None]
    if cap is None:
        pieces = layer_by_layer(model, chunk_tokens=chunk)
    else:
        pieces = chunked(model, cap_tokens=cap, chunk_tokens=chunk)
    with pieces:
        prompt = torch.tensor([document.prompt_ids])
        first = model(prompt, past_key_values=cache, logits_to_keep=1).logits
    kept = [cache.kept_positions(layer) for layer in cache.compressed_layers]
    answer = torch.tensor([document.answer_ids])
    logits = torch.cat([first, model(answer[:, :-1], past_key_values=cache).logits], dim=1)
    chances = logits.log_softmax(dim=-1).gather(2, answer[..., None])
    return kept, -float(chances.mean()), bool((logits.argmax(dim=-1) == answer).all())


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


def _chunked(given: Given) -> Iterator[Row]:
    documents = given.documents(given.tokens, given.count)
    exact: list[Any] = []
    for cap in given.caps:
        reads = [
            read_in_pieces(given.loaded.model, each, given.policy, cap, given.chunk_tokens)
            for each in documents
        ]
        exact = exact or reads
        shared = [
            shared_positions(ours, theirs, given.policy.window_size)
            for (ours, *_), (theirs, *_) in zip(reads, exact, strict=True)
        ]
        yield {
            "benchmark": "chunked",
            "policy": given.policy.describe(),
            "prompt_tokens": given.tokens,
            "chunk_tokens": given.chunk_tokens,
            "cap_tokens": cap,
            "documents": given.count,
            "kept_as_exact": round(fmean(shared), 4),
            "answer_nll": round(fmean(nll for _, nll, _ in reads), 4),
            "right_answers": sum(right for *_, right in reads),
        }


CHUNKED = Experiment(
    name="chunked",
    title="Reading under a cap",
    takes="two minutes",
    measure=_chunked,
    options={
        "tokens": Sized(1024, 150),
        "count": Sized(8, 1),
        "chunk_tokens": Sized(128, 30),
        "policy": Sized(CAPPED, SnapKV(40, window_size=8)),
        "caps": Sized(CAPS, (None, 150, 48)),
    },
    fields={"seed": SEED},
    tables=[
        Table(
            {
                "cap": lambda row: f"{row['cap_tokens']:,}" if row["cap_tokens"] else "none",
                "kept as without a cap": "{kept_as_exact:.0%}",
                "nats per token of the answer": "{answer_nll:.3f}",
                "right answers": "{right_answers} of {documents}",
            }
        )
    ],
)
