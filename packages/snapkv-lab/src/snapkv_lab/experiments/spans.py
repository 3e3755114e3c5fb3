"""What a dropped tool result costs: dropped later, never read, or everything else read again."""

import copy
import time
from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from snapkv import CompressedCache, FullCache, SnapKV
from snapkv.app.answering import read_prompt
from snapkv.app.likelihood import log_probabilities
from snapkv.app.prefills import Exact
from snapkv.app.prompt_end import PromptEnd
from snapkv.app.prompts import Prompt
from snapkv.app.transcripts import Transcript
from snapkv.policies import Policy
from snapkv_lab.evaluate.tasks import ToolResults
from snapkv_lab.experiments.experiment import Experiment, Given, Sized
from snapkv_lab.experiments.pages import Table
from snapkv_lab.experiments.records import Row, grouped

WHOLE, DROPPED, AGAIN = "whole", "dropped", "again"
NAMES = {
    WHOLE: "nothing dropped",
    DROPPED: "dropped when all had been read",
    AGAIN: "read again without it",
}
"""The last one is also the prompt that never had it, but for the time it takes."""


def _measure(given: Given) -> Iterator[Row]:
    """Sessions of tool calls, of which the first results are dropped, and two questions each."""
    task = ToolResults(lines=given.lines)
    for number in range(given.count):
        messages, asked = task.session(f"spans/{number}", given.results)
        for budget in given.budgets:
            policy: Policy = FullCache() if not budget else SnapKV(budget, pooling="fading")
            for row in _session(given, policy, messages, asked):
                yield {"session": number, "budget": budget or None, **row}


def _session(
    given: Given, policy: Policy, messages: Any, asked: list[tuple[str, str]]
) -> Iterator[Row]:
    tools = [place for place, message in enumerate(messages) if message["role"] == "tool"]
    old = tools[: round(len(tools) * given.dropped_share)]
    fewer = [message for place, message in enumerate(messages) if place not in old]
    gone = [pair for pair in asked if _holds(messages, old, pair)]
    kept = [pair for pair in asked if pair not in gone]
    whole, said = _read(given, policy, list(messages))
    for name in NAMES:
        told, cache, begin = list(messages), copy.copy(whole), time.perf_counter()
        if name == AGAIN:
            told = fewer
            cache, said = _read(given, policy, told)
        elif name == DROPPED:
            parts = Transcript.of(told).asking("?").prompt(given.loaded.tokenizer)[1]
            results = [part.span for part in parts if part.role == "tool"]
            cache.drop(results[: len(old)])
        for of, pair in (("kept", kept[0]), ("dropped", gone[0])):
            loss, right, first = _asked(given, cache, told, said, pair, begin)
            report = cache.report()
            yield {
                "contender": name,
                "asked": of,
                "loss": round(loss, 4),
                "right": right,
                "first_token_seconds": round(first, 3) if of == "kept" else None,
                "seen_tokens": report.seen_tokens,
                "dropped_tokens": report["dropped_tokens"],
                "held_bytes": report.held_bytes,
                "host_bytes": report.host_bytes,
            }


def _holds(messages: Any, places: list[int], pair: tuple[str, str]) -> bool:
    return any(f"{pair[0]}: {pair[1]}" in messages[place]["content"] for place in places)


def _prompt(given: Given, told: list[Any], key: str) -> tuple[Tensor, int]:
    """(1, T) ids up to where the number comes, and after how many the question begins."""
    tokenizer = given.loaded.tokenizer
    question = f"What is the number of {key}? Answer with the number."
    prompt, parts = Transcript.of(list(told)).asking(question).prompt(tokenizer)
    whole = Prompt(text=f"{prompt.text}{key}:", has_special_tokens=True)
    return whole.token_ids(tokenizer), parts[-1].span[0]


def _read(given: Given, policy: Policy, told: list[Any]) -> tuple[CompressedCache, int]:
    """A cache that has read the messages, and how many tokens they are."""
    ids, said = _prompt(given, told, "?")
    options = {} if isinstance(policy, FullCache) else {"recall": "host"}
    cache = CompressedCache(given.loaded.model, policy, **options)
    read_prompt(given.loaded, ids[:, :said], cache, Exact())
    return cache, said


@torch.no_grad()
def _asked(
    given: Given,
    cache: CompressedCache,
    told: list[Any],
    said: int,
    pair: tuple[str, str],
    begin: float,
) -> tuple[float, bool, float]:
    """Of the right number the loss, and whether it is the answer; seconds to its first token."""
    model, branch = given.loaded.model, copy.copy(cache)
    ids, _ = _prompt(given, told, pair[0])
    branch.expect_prompt(ids.shape[1])
    logits = model(ids[:, said:], past_key_values=branch, logits_to_keep=1).logits
    seconds = time.perf_counter() - begin
    answer = given.loaded.tokenizer(f" {pair[1]}", add_special_tokens=False).input_ids
    end = PromptEnd(cache=branch, logits=logits)
    chosen, leads = log_probabilities(model, end, torch.tensor([answer]))
    return -float(chosen.mean()), bool(leads.all()), seconds


def _means(rows: list[Row]) -> Iterable[Row]:
    names = list(NAMES)
    cells = grouped(rows, lambda row: (row["budget"] or 0, names.index(row["contender"])))
    for (budget, place), own in sorted(cells.items()):
        of = {part: [row for row in own if row["asked"] == part] for part in ("kept", "dropped")}
        yield {
            "name": NAMES[names[place]],
            "budget": budget or "all",
            "seconds": fmean(row["first_token_seconds"] for row in of["kept"]),
            "held_bytes": fmean(row["held_bytes"] for row in own),
            "host_bytes": fmean(row["host_bytes"] for row in own),
            **{f"{part}_loss": fmean(row["loss"] for row in of[part]) for part in of},
            **{f"{part}_right": fmean(row["right"] for row in of[part]) for part in of},
        }


SPANS = Experiment(
    name="spans",
    title="Spans that are dropped",
    measure=_measure,
    options={
        "count": Sized(20, 1),
        "results": Sized(4, 2),
        "lines": Sized(5, 3),
        "dropped_share": Sized(0.5, 0.5),
        "budgets": Sized((0, 128), (0, 64)),
    },
    tables=[
        Table(
            {
                "tool results": "{name}",
                "budget": "{budget}",
                "loss, kept result": "{kept_loss:.3f}",
                "right": "{kept_right:.0%}",
                "loss, dropped result": "{dropped_loss:.2f}",
                "right then": "{dropped_right:.0%}",
                "s to the first token": "{seconds:.2f}",
                "device": "{held_bytes:bytes}",
                "host": "{host_bytes:bytes}",
            },
            "Old tool results are dropped, and a question follows",
            {},
            _means,
        )
    ],
)
