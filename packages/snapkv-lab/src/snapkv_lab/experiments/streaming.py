"""Perplexity over a text many times as long as the cache, with attention sinks and without."""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from snapkv import CompressedCache, FullCache, StreamingLLM
from snapkv.policies import Policy
from snapkv_lab.evaluate.haystack import python_topics
from snapkv_lab.experiments.experiment import Experiment, Given, Shown, of, pivot
from snapkv_lab.experiments.records import Row, markdown_table

BUDGET = 256
CHUNK_TOKENS = 64
FULL_CHUNK_TOKENS = 512
"""What is dropped after a chunk does not depend on its size where nothing is dropped."""
BUCKET_TOKENS = 1024
DEFAULT_TOKENS = 8 * BUCKET_TOKENS
TRUE_POSITION_TOKENS = 8 * BUCKET_TOKENS
"""How far the methods go whose distances grow with the text: the demo model's trained length."""

METHODS: dict[str, Policy] = {
    "sinks, cache positions": StreamingLLM(BUDGET),
    "no sinks": StreamingLLM(BUDGET, start=0),
    "sinks, original positions": StreamingLLM(BUDGET, positions="original"),
    "full cache": FullCache(),
}

TRUE_POSITIONS = ("sinks, original positions", "full cache")


def measure(given: Given) -> Iterator[Row]:
    """Stream the same text through every method's cache."""
    loaded, text, tokens = given.loaded, python_topics(), given.options["tokens"]
    ids = loaded.tokenizer(text.text, add_special_tokens=False, verbose=False).input_ids
    for method, policy in METHODS.items():
        wanted = min(tokens, TRUE_POSITION_TOKENS) if method in TRUE_POSITIONS else tokens
        print(f"{method}: {wanted} tokens", file=sys.stderr)
        start = time.perf_counter()
        chunk = FULL_CHUNK_TOKENS if isinstance(policy, FullCache) else CHUNK_TOKENS
        losses = stream(loaded.model, policy, ids[: wanted + 1], chunk)
        seconds = time.perf_counter() - start
        for bucket, nll in enumerate(bucket_means(losses, BUCKET_TOKENS)):
            yield {
                "task": "streaming perplexity",
                "text": text.name,
                "method": method,
                "policy": policy.name,
                "settings": policy.describe(),
                "chunk_tokens": chunk,
                "trained_tokens": loaded.max_tokens,
                "first_token": bucket * BUCKET_TOKENS,
                "bucket_tokens": BUCKET_TOKENS,
                "nll": round(nll, 4),
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


def bucket_means(losses: Sequence[float], size: int) -> list[float]:
    """The mean of every `size` losses; an incomplete last bucket is left out."""
    whole = len(losses) // size
    return [sum(losses[i * size : (i + 1) * size]) / size for i in range(whole)]


def _tables(rows: list[Row]) -> list[str]:
    budget = next(row["settings"]["budget"] for row in rows if "budget" in row["settings"])
    size = rows[0]["bucket_tokens"]
    cells = [
        row
        | {"tokens": f"{row['first_token'] + 1:,}-{row['first_token'] + size:,}"}
        | {"perplexity": math.exp(row["nll"])}
        for row in rows
    ]
    return [
        f"## Perplexity, budget {budget}",
        _means(rows),
        "## By place in the text",
        pivot(cells, "tokens", "{tokens}", "{method}", "{perplexity:.2f}"),
    ]


def _means(rows: list[Row]) -> str:
    """Past the first bucket, and past the trained length: the perplexity of a stretch."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    starts = {name: {row["first_token"] for row in of(rows, method=name)} for name in methods}
    shared = set.intersection(*starts.values()) - {0}
    beyond = {s for s in set.union(*starts.values()) if s >= rows[0]["trained_tokens"]}
    lines = [_mean_line(rows, methods, own) for own in (shared, beyond) if own]
    return markdown_table(["tokens", *methods], lines)


def _mean_line(rows: list[Row], methods: list[str], starts: set[int]) -> list[str]:
    line = [f"{min(starts) + 1:,} to {max(starts) + rows[0]['bucket_tokens']:,}"]
    for name in methods:
        of_method = {row["first_token"]: row["nll"] for row in of(rows, method=name)}
        own = [of_method[start] for start in sorted(starts) if start in of_method]
        whole = len(own) == len(starts)
        line.append(f"{math.exp(sum(own) / len(own)):.2f}" if whole else "-")
    return line


EXPERIMENT = Experiment(
    name="streaming",
    title="Streaming",
    measure=measure,
    options={"tokens": DEFAULT_TOKENS},
    tables=_tables,
    shown={
        "streaming": Shown(
            "Perplexity, budget 256",
            (
                "tokens",
                "sinks, cache positions",
                "no sinks",
                "sinks, original positions",
                "full cache",
            ),
        )
    },
)


if __name__ == "__main__":
    EXPERIMENT.main()
