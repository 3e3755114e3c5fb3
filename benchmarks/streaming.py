"""Perplexity over a text many times as long as the cache, with attention sinks and without.

    python -m benchmarks.streaming                  measure, write the rows, render the page
    python -m benchmarks.streaming --tokens 32768   the same over that many tokens
    python -m benchmarks.streaming --render         render the page from the rows that are there

Rows: `docs/results/streaming.jsonl`. Page: `docs/results/streaming.md`.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.environment import describe_environment
from benchmarks.records import (
    RESULTS,
    Row,
    environment_line,
    markdown_table,
    read_rows,
    write_rows,
)
from snapkv import CompressedCache, FullCache, StreamingLLM
from snapkv.app.models import load
from snapkv.lab.evaluate.haystack import python_topics
from snapkv.policies import Policy

ROWS = RESULTS / "streaming.jsonl"
PAGE = RESULTS / "streaming.md"

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


def measure(tokens: int) -> Iterator[Row]:
    """Stream the same text through every method's cache."""
    loaded, text = load("demo"), python_topics()
    environment = describe_environment()
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
                "model": loaded.description(),
                "environment": environment,
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


def render(rows: list[Row]) -> str:
    """The page that these rows make."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    cells = {(row["method"], row["first_token"]): f"{math.exp(row['nll']):.2f}" for row in rows}
    starts = sorted({row["first_token"] for row in rows})
    table = markdown_table(
        ["tokens", *methods],
        [
            [f"{start + 1:,}-{start + rows[0]['bucket_tokens']:,}"]
            + [cells.get((method, start), "-") for method in methods]
            for start in starts
        ],
    )
    return f"{_HEAD}\n\n{_setting(rows, starts)}\n\n{table}\n\n{_means(rows)}\n"


_HEAD = """\
# Streaming: perplexity over a text many times as long as the cache

One long text goes through the model in chunks, each method with a cache of its own. A chunk is
read, then the cache is cut to its budget. With "cache positions" tokens are numbered by their place
in the cache; with "original positions" the sinks stay where they were read, at an ever growing
distance. "No sinks" is the plain sliding window of the same budget.

Rendered from `streaming.jsonl` by `python -m benchmarks.streaming`; each row has all settings."""


def _setting(rows: list[Row], starts: list[int]) -> str:
    first = rows[0]
    seen, trained = starts[-1] + first["bucket_tokens"], first["trained_tokens"]
    budget = next(row["settings"]["budget"] for row in rows if "budget" in row["settings"])
    reach = (
        f"{seen:,} tokens are {seen / budget:.0f} times the budget and {seen / trained:.1f} times "
        f"the {trained:,} positions the model was trained for."
    )
    missing = (
        ""
        if seen >= 4 * trained
        else f" Not run here: four times the trained length, `--tokens {4 * trained}`."
    )
    return (
        f"{first['text']}, budget {budget} (including 4 sinks, where there are any), chunks of "
        f"{first['chunk_tokens']} tokens (the full cache drops nothing, so its chunks do not "
        f"matter). {reach}{missing} {environment_line(rows)}."
    )


def _means(rows: list[Row]) -> str:
    """How the methods compare past the first bucket, and how they go on past the trained length."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    starts = {name: {r["first_token"] for r in rows if r["method"] == name} for name in methods}
    shared = set.intersection(*starts.values()) - {0}
    lines = [_mean_line(rows, methods, shared)] if shared else []
    farthest = set.union(*starts.values())
    beyond = {start for start in farthest if start >= rows[0]["trained_tokens"]}
    if beyond:
        lines.append(_mean_line(rows, [m for m in methods if beyond <= starts[m]], beyond))
    lines.append(
        "The text is easier in some buckets than in others, so compare methods within a line of "
        "the table."
    )
    return "\n\n".join(lines)


def _mean_line(rows: list[Row], methods: list[str], starts: set[int]) -> str:
    means = []
    for name in methods:
        own = [row["nll"] for row in rows if row["method"] == name and row["first_token"] in starts]
        means.append(f"{name} {math.exp(sum(own) / len(own)):.2f}")
    last = max(starts) + rows[0]["bucket_tokens"]
    return f"Perplexity of tokens {min(starts) + 1:,} to {last:,}: {', '.join(means)}."


def main() -> None:
    """Measure unless told only to render."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--render", action="store_true", help="only render the page from the rows")
    parser.add_argument("--tokens", type=int, default=DEFAULT_TOKENS, help="length of the text")
    options = parser.parse_args()
    if not options.render:
        write_rows(ROWS, measure(options.tokens))
    PAGE.write_text(render(read_rows(ROWS)), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
