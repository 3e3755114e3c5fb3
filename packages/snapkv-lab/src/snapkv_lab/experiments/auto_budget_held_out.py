"""Words and automatic budgets on texts of 1k to 7k tokens, of kinds that chose neither.

The texts are those of `snapkv_lab.experiments.held_out`. Each is read once with the full cache;
every policy compresses a copy of it and generates an answer, which is right if it has the expected
words. A row is a question, with the answers where the full cache has it right.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from snapkv import AutoBudget, CompressedCache, default_policy
from snapkv.cli.notes import word_for
from snapkv.policies import FullCache, Policy, PromptLayer
from snapkv.prefill.selective import tokens_that_go_on
from snapkv.validation import SMALL_WINDOW
from snapkv_lab.experiments.auto_budget import WORDS, WORDS_TITLE, last_run
from snapkv_lab.experiments.environment import describe_environment
from snapkv_lab.experiments.experiment import Experiment, Given, Shown
from snapkv_lab.experiments.held_out import Asked, HeldOut, held_out
from snapkv_lab.experiments.pooling_reading import ReadText
from snapkv_lab.experiments.pooling_rows import counted
from snapkv_lab.experiments.reading import ReadPrompt
from snapkv_lab.experiments.records import Row, append_rows, markdown_table

ROUNDS = 8
ANSWER_TOKENS = 28
MORE_TOKENS = 6
"""By so many an answer may be longer than that of the full cache."""

SHARES = (0.075, 0.15, 0.3)
"""Of the prompt, that may go on where it is read selectively."""

BOUNDS = (0.004, 0.0025, 0.0015, 0.001)


@dataclass(frozen=True, kw_only=True)
class _UndilutedBudget(AutoBudget):
    """The same bound however long the prompt is."""

    def voted(self, shares: Tensor) -> Tensor:
        """Those above it."""
        return (shares > self.lost_vote).sum(dim=-1)


def policies() -> dict[str, Policy]:
    """Every policy of the comparison, by its name in the rows."""
    return {
        "undiluted 0.0025": default_policy(_UndilutedBudget(lost_vote=0.0025)),
        **{f"auto {bound}": default_policy(AutoBudget(lost_vote=bound)) for bound in BOUNDS},
        "fading 1/4": default_policy(keep_ratio=1 / 4),
    }


def measure(given: Given) -> Iterator[Row]:
    """Read every text from a round on that has no row yet; append a row for each question.

    Two may run side by side: what another has measured meanwhile is not added again.
    """
    loaded, first = given.loaded, given.options["first"]
    run = {"model": loaded.description(), "environment": describe_environment()}
    append_rows(EXPERIMENT.rows, [run] if run not in EXPERIMENT.known() else [])
    for text in held_out(loaded.tokenizer, range(first, ROUNDS)):
        if _is_there(text):
            continue
        read = ReadText(loaded.model, text.ids)
        rows = [_row(loaded.tokenizer, read, text, each) for each in text.asked]
        if not _is_there(text):
            append_rows(EXPERIMENT.rows, rows)
            print(text.name, [row["full"] for row in rows], file=sys.stderr, flush=True)
            yield from rows


def _is_there(text: HeldOut) -> bool:
    return text.name in {row.get("text") for row in EXPERIMENT.known()}


@torch.inference_mode()
def _row(tokenizer: Any, read: ReadText, text: HeldOut, asked: Asked) -> Row:
    prompt = read.asked(asked.ids)
    answering = _Answering(tokenizer, prompt, asked.expected)
    ids = answering.generated(prompt.compressed(FullCache()))
    answer = tokenizer.decode(ids)
    row: Row = {
        "text": text.name,
        "kind": text.kind,
        "tokens": prompt.prompt_tokens,
        "expected": asked.expected,
        "full": asked.expected in answer,
        "answer": answer,
    }
    if not row["full"]:
        return row
    shown = [replace(layer, queries=layer.queries[:, :, -SMALL_WINDOW:]) for layer in prompt.layers]
    answers = {name: _answer(answering, ids, shown, policy) for name, policy in policies().items()}
    places = _places(text.ids, tokenizer, asked.expected)
    return row | {"answers": answers, "needed": _needed(shown, places) if places else None}


def _places(ids: Sequence[int], tokenizer: Any, expected: str) -> list[int]:
    """Where the expected words stand in a text; none where they are other tokens there."""
    for text in (f" {expected}", expected):
        own = tokenizer(text, add_special_tokens=False).input_ids
        for start in range(len(ids) - len(own) + 1):
            if list(ids[start : start + len(own)]) == own:
                return list(range(start, start + len(own)))
    return []


def _needed(shown: list[PromptLayer], places: list[int]) -> list[float | None]:
    """The least of some shares of a prompt that lets all places go on, behind every layer."""
    return [
        next((share for share in SHARES if _go_on(layer, places, share)), None) for layer in shown
    ]


def _go_on(layer: PromptLayer, places: list[int], share: float) -> bool:
    chosen = tokens_that_go_on(layer, keep_ratio=share, least_tokens=0)
    return chosen is None or set(places) <= set(chosen.keep_indices[0, 0].tolist())


def _answer(
    answering: "_Answering", ids: list[int], shown: list[PromptLayer], policy: Policy
) -> dict[str, Any]:
    cache = _compressed(answering.prompt, shown, policy)
    report = cache.report()
    peaks = torch.stack([layer.notes.lost_peak[0] for layer in cache.reading.layers])
    answer = answering.tokenizer.decode(answering.as_generated(cache, ids))
    right = answering.expected in answer
    return {
        "right": right,
        "answer": None if right else answer,
        "kept": round(report.kept_tokens, 1),
        "lost": round(report["lost_votes"], 5),
        "peak": round(report["lost_vote_peak"], 7),
        "peak_of_layer": round(float(peaks.mean(dim=1).max()), 7),
        "peak_of_head": round(float(peaks.max()), 7),
    }


def _compressed(prompt: ReadPrompt, shown: list[PromptLayer], policy: Policy) -> CompressedCache:
    """As `ReadPrompt.compressed`, but the votes are counted once for all policies."""
    cache = CompressedCache(prompt.model, policy)
    cache.expect_prompt(prompt.prompt_tokens)
    for layer, states in zip(cache.reading.layers, shown, strict=True):
        layer.store.fill(states.keys, states.values, states.keys.shape[1])
        layer.end_prompt(policy.select(states), states)
    return cache


@dataclass(frozen=True)
class _Answering:
    """What is generated greedily behind a prompt, and whether it has the expected words."""

    tokenizer: Any
    prompt: ReadPrompt
    expected: str

    def generated(self, cache: CompressedCache, most: int = ANSWER_TOKENS) -> list[int]:
        """Tokens until the words are there, at most so many."""
        token, ids = self.prompt.last_logits[0, -1].argmax(), list[int]()
        while len(ids) < most and int(token) != self.tokenizer.eos_token_id:
            ids.append(int(token))
            if self.expected in self.tokenizer.decode(ids):
                break
            logits = self.prompt.model(token[None, None], past_key_values=cache).logits
            token = logits[0, -1].argmax()
        return ids

    def as_generated(self, cache: CompressedCache, answer: list[int]) -> list[int]:
        """The answer of the full cache, if that is what is generated, else what is."""
        if len(answer) > 1:
            fed = torch.tensor([answer[:-1]])
            logits = self.prompt.model(fed, past_key_values=cache).logits
            if logits[0].argmax(dim=-1).tolist() == answer[1:]:
                return answer
            cache.crop(-fed.shape[1])
        return self.generated(cache, len(answer) + MORE_TOKENS)


DEFAULT = f"auto {AutoBudget.lost_vote}"
LAYERS = range(14, 25)


def _tables(rows: list[Row]) -> list[str]:
    known = [row for row in rows if row.get("answers")]
    of_length = _by_length(known)
    lines = [
        [
            f"{name} (default)" if name == DEFAULT else name,
            *(_kept(own, name) for own in [*of_length.values(), known]),
        ]
        for name in known[0]["answers"]
    ]
    asked = sum("text" in row for row in rows)
    return [
        f"## Right answers (share of the tokens kept), {len(known)} of {asked} questions",
        markdown_table(["policy", *(f"{n:,} tokens" for n in of_length), "all"], lines),
        f"## {WORDS_TITLE}",
        _words(known),
        "## Answers whose tokens the votes of a layer let go on",
        _going_on_by_layer([row for row in rows if row.get("needed")]),
    ]


def _by_length(rows: Sequence[Row]) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(int(row["text"].split("/")[1]), []).append(row)
    return dict(sorted(found.items()))


def _kept(rows: Sequence[Row], name: str) -> str:
    own = [(row["answers"][name], row["tokens"]) for row in rows]
    share = fmean(found["kept"] / tokens for found, tokens in own)
    return f"{sum(found['right'] for found, _ in own)}/{len(own)} ({share:.0%})"


def _words(rows: Sequence[Row]) -> str:
    names = list(rows[0]["answers"])
    families = {"all": names, DEFAULT: [DEFAULT], "fading 1/4": ["fading 1/4"]}

    def told(word: str, own: Sequence[str]) -> str:
        answers = ((row["answers"][name], row["tokens"]) for row in rows for name in own)
        return str(
            counted(each["right"] for each, n in answers if word_for(each["peak"], n) == word)
        )

    lines = [[word, *(told(word, own) for own in families.values())] for word in WORDS]
    return markdown_table(["word", *families], lines)


def _going_on_by_layer(known: Sequence[Row]) -> str:
    """Behind which layer the answers of longer texts go on in selective reading."""
    columns = {
        **{f"{share:.1%} go on": (known, share) for share in SHARES},
        **{f"15.0%, {n:,} tokens": (own, 0.15) for n, own in _by_length(known).items()},
    }
    lines = [
        [str(layer), *(_going_on(own, layer, share) for own, share in columns.values())]
        for layer in LAYERS
    ]
    return markdown_table(["layers that read all", *columns], lines)


def _going_on(rows: Sequence[Row], layer: int, share: float) -> str:
    needed = [row["needed"][layer - 1] for row in rows]
    found = sum(least is not None and least <= share for least in needed)
    return f"{found}/{len(needed)}"


EXPERIMENT = Experiment(
    name="auto_budget_held_out",
    title="The automatic budget and its words, on texts that chose neither",
    takes="a day",
    measure=measure,
    resumes=True,
    options={"first": 0},
    measured=last_run,
    tables=_tables,
    shown={
        "longer": Shown(
            "Right answers (share of the tokens kept), 117 of 195 questions",
            ("policy", "1,024 tokens", "7,168 tokens", "all"),
            ("undiluted 0.0025", "auto 0.0015 (default)", "auto 0.001", "fading 1/4"),
        ),
        "longer-words": Shown(WORDS_TITLE, ("word", "all", "auto 0.0015", "fading 1/4")),
    },
)


if __name__ == "__main__":
    EXPERIMENT.main()
