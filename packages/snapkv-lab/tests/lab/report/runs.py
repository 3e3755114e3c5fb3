"""Results of a run, made by hand."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from snapkv_lab.evaluate.runner import Results
from snapkv_lab.rows import Row
from tests.lab.evaluate.tiny import Keys

RUN = {
    "task": {"name": "keys", "haystack": "essays"},
    "model": {"name": "demo", "revision": "sha256:abc", "max_tokens": 8192},
    "template": "tokenizer",
    "limit": None,
    "samples": 6,
    "data": "sha256:123",
}


@dataclass(frozen=True, kw_only=True)
class Grid(Keys):
    """A task with two axes."""

    axes: ClassVar[tuple[str, ...]] = ("length", "depth")


@dataclass(frozen=True, kw_only=True)
class Sets(Keys):
    """A task with named columns and scores of a paper."""

    axes: ClassVar[tuple[str, ...]] = ("set",)

    def published(self, model):
        return {"full": {"qa": 0.5, "code": 0.25, "other": 1.0}} if model == "demo" else {}


def row(method, cell, score, *, status="ok", question="visible"):
    """Return a row of `summarise`; without a score, its only sample has no answer."""
    known = score is not None
    return {
        "task": "keys",
        "metric": "accuracy",
        "method": method,
        "question": question,
        "cell": cell,
        "policy": {"name": method.partition("@")[0]},
        "status": status,
        "samples": int(known),
        "failed": {} if known else {status: 1},
        "score": score,
        "interval": None,
        "difference": None,
        "scores": {json.dumps(cell): score} if known else {},
        **dict.fromkeys(("prompt_tokens", "kept_tokens"), 1024.0 if known else None),
        **dict.fromkeys(("held_bytes", "full_bytes"), 2.0**20 if known else None),
        **dict.fromkeys(("token_ms", "first_token_ms"), 12.5 if known else None),
    }


def answered(method, cell, scores):
    """Return a row whose samples have these scores."""
    mean = sum(scores) / len(scores) if scores else None
    named = {f"{json.dumps(cell)}/{number}": score for number, score in enumerate(scores)}
    return row(method, cell, mean) | {"scores": named}


def results(task, rows: Sequence[Row], **run) -> Results:
    return Results(folder=Path("results"), run=RUN | run, task=task, rows=list(rows))


def grid(methods=("full", "snapkv@512", "snapkv@1024"), lengths=(1024, 4096, 16384)) -> Results:
    """Return results where the full cache lacks memory at 4096 tokens, and 16384 are too long."""
    reasons = {16384: "too long"}
    made = []
    for length in lengths:
        for depth in (0, 50, 100):
            for number, method in enumerate(methods):
                no_memory = method == "full" and length == 4096
                status = "out of memory" if no_memory else reasons.get(length, "ok")
                score = (number + depth / 100) / 4 if status == "ok" else None
                made.append(row(method, {"length": length, "depth": depth}, score, status=status))
    return results(Grid(), made)


def sets() -> Results:
    scores = {"full": (0.5, 0.75, None), "snapkv@512": (0.5, 0.25, 0.125)}
    return results(
        Sets(),
        [
            row(method, {"set": name}, score, status="ok" if score is not None else "out of memory")
            for method, of_method in scores.items()
            for name, score in zip(("qa", "code", "news"), of_method, strict=True)
        ],
    )
