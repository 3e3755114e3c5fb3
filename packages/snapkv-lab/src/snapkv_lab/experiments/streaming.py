"""Perplexity over a text many times as long as the cache, with attention sinks and without."""

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

import torch

from snapkv import CompressedCache, FullCache, StreamingLLM
from snapkv.policies import Policy
from snapkv_lab.evaluate.haystack import python_topics
from snapkv_lab.experiments.experiment import Experiment, Given, Sized
from snapkv_lab.experiments.pages import Pivot, Table
from snapkv_lab.experiments.prompts import encode
from snapkv_lab.experiments.records import Row, grouped, of

FULL_CHUNK_TOKENS = 512
"""What is dropped after a chunk does not depend on its size where nothing is dropped."""

TRUE_POSITIONS = ("sinks, original positions", "full cache")
"""Their distances grow with the text, so they go only as far as the model was trained."""


def _policies(budget: int) -> dict[str, Policy]:
    return {
        "sinks, cache positions": StreamingLLM(budget),
        "no sinks": StreamingLLM(budget, start=0),
        "sinks, original positions": StreamingLLM(budget, positions="original"),
        "full cache": FullCache(),
    }


def _measure(given: Given) -> Iterator[Row]:
    loaded, text, size = given.loaded, python_topics(), given.bucket_tokens
    ids = encode(loaded.tokenizer, text.text)
    for method, policy in _policies(given.budget).items():
        most = given.true_position_tokens if method in TRUE_POSITIONS else given.tokens
        wanted = min(given.tokens, most)
        print(f"{method}: {wanted} tokens", file=sys.stderr)
        start = time.perf_counter()
        chunk = FULL_CHUNK_TOKENS if method == "full cache" else given.chunk_tokens
        losses = stream(loaded.model, policy, ids[: wanted + 1], chunk)
        seconds = time.perf_counter() - start
        for bucket in range(len(losses) // size):  # an incomplete last one is left out
            yield {
                "task": "streaming perplexity",
                "text": text.name,
                "method": method,
                "policy": policy.name,
                "settings": policy.describe(),
                "chunk_tokens": chunk,
                "trained_tokens": loaded.max_tokens,
                "first_token": bucket * size,
                "bucket_tokens": size,
                "nll": round(fmean(losses[bucket * size : (bucket + 1) * size]), 4),
                "method_seconds": round(seconds, 1),
            }


@torch.inference_mode()
def stream(model: Any, policy: Policy, ids: Sequence[int], chunk_tokens: int) -> list[float]:
    """Negative log-likelihood (nats) of every token after the first, fed in chunks.

    A chunk is appended, attended to and only then cut, so a token sees what was kept and the
    tokens of its chunk before it.
    """
    cache, losses = CompressedCache(model, policy), []
    text = torch.tensor([ids], device=model.device)
    for start in range(0, len(ids) - 1, chunk_tokens):
        chunk = text[:, start : start + chunk_tokens]
        following = text[0, start + 1 : start + 1 + chunk_tokens]
        logits = model(chunk, past_key_values=cache).logits[0, : len(following)]
        losses.append(
            torch.nn.functional.cross_entropy(logits.float(), following, reduction="none")
        )
    return torch.cat(losses).tolist()


def _means(rows: list[Row]) -> Iterable[Row]:
    """Past the first bucket, and past the trained length: the perplexity of a stretch."""
    starts = {
        name: {row["first_token"] for row in own} for name, own in grouped(rows, "method").items()
    }
    shared = set.intersection(*starts.values()) - {0}
    beyond = {s for s in set.union(*starts.values()) if s >= rows[0]["trained_tokens"]}
    for stretch in filter(None, (shared, beyond)):
        end = max(stretch) + rows[0]["bucket_tokens"]
        for name in starts:
            own = [row["nll"] for row in of(rows, method=name) if row["first_token"] in stretch]
            yield {
                "tokens": f"{min(stretch) + 1:,} to {end:,}",
                "method": name,
                "perplexity": f"{math.exp(fmean(own)):.2f}" if len(own) == len(stretch) else "-",
            }


def _place(row: Row) -> str:
    return f"{row['first_token'] + 1:,}-{row['first_token'] + row['bucket_tokens']:,}"


STREAMING = Experiment(
    name="streaming",
    title="Streaming",
    measure=_measure,
    options={
        "tokens": Sized(8192, 128),
        "true_position_tokens": 8192,
        "budget": Sized(256, 32),
        "chunk_tokens": Sized(64, 16),
        "bucket_tokens": Sized(1024, 32),
    },
    tables=[
        Table(
            Pivot("tokens", "{tokens}", "{method}", "{perplexity}"),
            "Perplexity, budget {settings[budget]}",
            made=_means,
        ),
        Table(
            Pivot("tokens", _place, "{method}", lambda row: f"{math.exp(row['nll']):.2f}"),
            "By place in the text",
        ),
    ],
)
