"""A budget that the votes choose, against fixed ones; and how often the words for it were right.

`auto_budget`: texts of about a thousand tokens, of the kinds that the pooling was chosen by, the
right answer fed. `auto_budget_held_out`: texts of 1k to 7k tokens of kinds that chose neither;
every policy generates an answer, which is right if it has the expected words. A row is a question.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from snapkv import AdaKV, AutoBudget, CompressedCache, SnapKV, default_policy
from snapkv.app.observing import RecordedPrompt
from snapkv.cli.notes import DOUBTFUL_BELOW, SAFE_BELOW, word_for
from snapkv.policies import FullCache, Policy, PromptLayer
from snapkv.prefill.selective import tokens_that_go_on
from snapkv.validation import SMALL_WINDOW
from snapkv_lab.experiments.experiment import Experiment, Given, Sized
from snapkv_lab.experiments.held_out import held_out
from snapkv_lab.experiments.pages import Table, markdown_table
from snapkv_lab.experiments.prompts import encode
from snapkv_lab.experiments.records import Row, grouped, last_run
from snapkv_lab.experiments.texts import (
    Case,
    ReadText,
    Text,
    answers_of,
    counted,
    loss_above,
    questions,
    right_of,
    scored,
    texts_from,
)


def _policies() -> dict[str, Policy]:
    budgets = (48, 64, 96, 128, 192, 256, 384)
    fixed = {f"fading {budget}": default_policy(budget) for budget in budgets}
    papers = {f"paper's {budget}": SnapKV(budget) for budget in (128, 256, 384)}
    bounds = {b: default_policy(AutoBudget(lost_vote=b)) for b in (0.01, 0.005, 0.0025, 0.001)}
    auto = {f"auto {bound}": policy for bound, policy in bounds.items()}
    shared = {f"auto {bound}, by head": AdaKV(bounds[bound]) for bound in (0.005, 0.0025)}
    return {**fixed, **papers, **auto, **shared}


def _measure(given: Given, text: Text) -> Iterator[Row]:
    def answers(prompt: RecordedPrompt, case: Case) -> Iterator[Row]:
        for name, policy in _policies().items():
            yield {"name": name} | _answer(prompt, policy, case)

    return questions(given.loaded.model, text, answers)


def _answer(prompt: RecordedPrompt, policy: Policy, case: Case) -> Row:
    """What one policy answers, and what its cache reports behind the prompt."""
    cache = prompt.compressed(policy)
    report = cache.report()
    kept = [layer["kept_tokens"] for layer in report["layers"]]
    return scored(prompt, cache, case) | {
        "kept": round(report.kept_tokens, 1),
        "kept_least": min(kept),
        "kept_most": max(kept),
        "bytes": report.held_bytes / report.full_bytes,
        "lost": report["lost_votes"],
        "peak": report["lost_vote_peak"],
    }


WORDS = ("safe", "doubtful", "lost")
WORDS_TITLE = "The word for the lost votes, and whether the answer was right"

_FAMILIES = {"all": "", "fading, fixed": "fading", "auto": "auto", "the paper's": "paper"}
"""Of policies, by how their names begin."""


def _tables(rows: list[Row]) -> list[str]:
    asked = [row for row in rows if row.get("answers")]
    tokens = round(fmean(row["prompt_tokens"] for row in asked))
    answers = answers_of(asked)
    by_name = grouped(answers, "name")
    table = Table(
        {
            "policy": lambda own: own[0]["name"],
            "tokens kept": lambda own: f"{_mean(own, 'kept'):.0f}",
            "bytes": lambda own: f"{100 * _mean(own, 'bytes'):.0f} %",
            "right": lambda own: str(right_of(own)),
            "loss per token above the full cache's": lambda own: f"{loss_above(own):+.3f}",
        },
        made=lambda _: by_name.values(),
    )
    peaks = (0.00075, SAFE_BELOW, 0.002, 0.004, DOUBTFUL_BELOW, 0.016, 0.032)
    return [
        f"## Prompts of about {tokens:,} tokens",
        *table.parts(rows),
        f"## {WORDS_TITLE}",
        _families("word", answers, lambda found: word_for(found["peak"], found["lost"], 0), WORDS),
        "## The highest lost vote, and whether the answer was right",
        _families("peak", answers, *_bins("peak", peaks)),
        "## The sum of the lost votes, and whether the answer was right",
        _families("mass", answers, *_bins("lost", (0.1, 0.15, 0.2, 0.3, 0.4))),
    ]


def _families(
    what: str, answers: Sequence[Row], label: Callable[[Row], str], order: Sequence[str]
) -> str:
    """How often answers were right, by what a number of theirs is called."""
    found = grouped(answers, label)
    lines = [
        [
            value,
            *(
                str(right_of(row for row in found.get(value, ()) if row["name"].startswith(begin)))
                for begin in _FAMILIES.values()
            ),
        ]
        for value in order
    ]
    return markdown_table([what, *_FAMILIES], lines)


def _bins(key: str, borders: Sequence[float]) -> tuple[Callable[[Row], str], list[str]]:
    names = [*(f"below {border:g}" for border in borders), f"{borders[-1]:g} and more"]
    return lambda row: names[sum(row[key] >= border for border in borders)], names


def _mean(answers: Iterable[Row], number: str) -> float:
    return fmean(row[number] for row in answers)


AUTO_BUDGET = Experiment(
    name="auto_budget",
    title="The budget that the votes choose, and how often its words were right",
    takes="hours",
    measure=_measure,
    cases=lambda given, part: texts_from(given, 80),
    options={"tokens": Sized(1024, 512), "rounds": Sized(12, 1)},
    measured=last_run,
    tables=_tables,
)

SHARES = (0.075, 0.15, 0.3)
"""Of the prompt, that may go on where it is read selectively."""


@dataclass(frozen=True, kw_only=True)
class _UndilutedBudget(AutoBudget):
    """The same bound however long the prompt is."""

    def voted(self, shares: Tensor) -> Tensor:
        return (shares > self.lost_vote).sum(dim=-1)


def _held_out_policies() -> dict[str, Policy]:
    bounds = (0.004, 0.0025, 0.0015, 0.001)
    return {
        "undiluted 0.0025": default_policy(_UndilutedBudget(lost_vote=0.0025)),
        **{f"auto {bound}": default_policy(AutoBudget(lost_vote=bound)) for bound in bounds},
        "fading 1/4": default_policy(keep_ratio=1 / 4),
    }


@torch.inference_mode()
def _measure_held_out(given: Given, text: Text) -> Iterator[Row]:
    """The answers of every policy to each question that the full cache answers right."""
    tokenizer = given.loaded.tokenizer
    for row, answering, ids in answered_in_full(given, text):
        row["answer"] = tokenizer.decode(ids)
        if row["full"]:
            row["answers"] = {n: answering.by(p, ids) for n, p in _held_out_policies().items()}
            places = _places(text.ids, tokenizer, answering.expected)
            row["needed"] = _needed(answering.prompt.layers, places) if places else None
        yield row


def _places(ids: Sequence[int], tokenizer: Any, expected: str) -> list[int]:
    """Where the expected words stand in a text; none where they are other tokens there."""
    for text in (f" {expected}", expected):
        own = encode(tokenizer, text)
        for start in range(len(ids) - len(own) + 1):
            if list(ids[start : start + len(own)]) == own:
                return list(range(start, start + len(own)))
    return []


def _needed(layers: Sequence[PromptLayer], places: list[int]) -> list[float | None]:
    """The least of some shares of a prompt that lets all places go on, behind every layer."""
    shown = (replace(layer, queries=layer.queries[:, :, -SMALL_WINDOW:]) for layer in layers)
    return [next((s for s in SHARES if _go_on(layer, places, s)), None) for layer in shown]


def _go_on(layer: PromptLayer, places: list[int], share: float) -> bool:
    chosen = tokens_that_go_on(layer, keep_ratio=share)
    return chosen is None or set(places) <= set(chosen.keep_indices[0, 0].tolist())


@dataclass(frozen=True)
class Answering:
    """What is generated greedily behind a prompt, and whether it has the expected words."""

    tokenizer: Any
    prompt: RecordedPrompt
    expected: str

    def by(self, policy: Policy, ids: list[int]) -> Row:
        """One policy's answer, beside that of the full cache, and what it lost."""
        cache = self.prompt.compressed(policy)
        report = cache.report()
        peaks = torch.stack([layer.notes.lost_peak[0] for layer in cache.reading.layers])
        return self.answered(cache, ids) | {
            "kept": round(report.kept_tokens, 1),
            "lost": round(report["lost_votes"], 5),
            "peak": round(report["lost_vote_peak"], 7),
            "peak_of_layer": round(float(peaks.mean(dim=1).max()), 7),
            "peak_of_head": round(float(peaks.max()), 7),
        }

    def answered(self, cache: CompressedCache, ids: list[int]) -> Row:
        """What is generated on a cache, beside what is on the full one, and whether it is right."""
        answer = self.tokenizer.decode(self.as_generated(cache, ids))
        right = self.expected in answer
        return {"right": right, "answer": None if right else answer}

    def generated(self, cache: CompressedCache, most: int = 28) -> list[int]:
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
        return self.generated(cache, len(answer) + 6)


def answered_in_full(given: Given, text: Text) -> Iterator[tuple[Row, Answering, list[int]]]:
    """Of every question a row, what answers it on other caches, and the full cache's answer."""
    tokenizer, read = given.loaded.tokenizer, ReadText(given.loaded.model, text.ids)
    for asked in text.cases:
        prompt = read.asked(asked.ids)
        answering = Answering(tokenizer, prompt, asked.expected)
        ids = answering.generated(prompt.compressed(FullCache()))
        row: Row = {
            "text": text.name,
            "kind": text.name.partition("/")[0],
            "tokens": prompt.prompt_tokens,
            "expected": asked.expected,
            "full": asked.expected in tokenizer.decode(ids),
        }
        yield row, answering, ids


DEFAULT = f"auto {AutoBudget.lost_vote}"


def _held_out_tables(rows: list[Row]) -> list[str]:
    known, asked = [row for row in rows if row.get("answers")], sum("text" in row for row in rows)
    lengths = _by_length(known)
    lines = [
        [
            f"{name} (default)" if name == DEFAULT else name,
            *(_kept(own, name) for own in [*lengths.values(), known]),
        ]
        for name in known[0]["answers"]
    ]
    return [
        f"## Right answers (share of the tokens kept), {len(known)} of {asked} questions",
        markdown_table(["policy", *(f"{n:,} tokens" for n in lengths), "all"], lines),
        f"## {WORDS_TITLE}",
        _words(known),
        "## Answers whose tokens the votes of a layer let go on",
        _going_on_by_layer([row for row in rows if row.get("needed")]),
    ]


def _by_length(rows: Sequence[Row]) -> dict[int, list[Row]]:
    return dict(sorted(grouped(rows, lambda row: int(row["text"].split("/")[1])).items()))


def _kept(rows: Sequence[Row], name: str) -> str:
    own = [(row["answers"][name], row["tokens"]) for row in rows]
    share = fmean(found["kept"] / tokens for found, tokens in own)
    return f"{sum(found['right'] for found, _ in own)}/{len(own)} ({share:.0%})"


def _words(rows: Sequence[Row]) -> str:
    families = {"all": [*rows[0]["answers"]], DEFAULT: [DEFAULT], "fading 1/4": ["fading 1/4"]}

    def told(word: str, own: Sequence[str]) -> str:
        answers = ((row["answers"][name], row["tokens"]) for row in rows for name in own)
        rights = (
            each["right"] for each, n in answers if word_for(each["peak"], each["lost"], n) == word
        )
        return str(counted(rights))

    lines = [[word, *(told(word, own) for own in families.values())] for word in WORDS]
    return markdown_table(["word", *families], lines)


def _going_on_by_layer(known: Sequence[Row]) -> str:
    """Behind which layer the answers of longer texts go on in selective reading."""
    columns = {
        **{f"{share:.1%} go on": (known, share) for share in SHARES},
        **{f"15.0%, {n:,} tokens": (own, 0.15) for n, own in _by_length(known).items()},
    }

    def told(rows: Sequence[Row], layer: int, share: float) -> str:
        needed = [row["needed"][layer - 1] for row in rows]
        return f"{sum(least is not None and least <= share for least in needed)}/{len(needed)}"

    lines = [
        [str(layer), *(told(own, layer, share) for own, share in columns.values())]
        for layer in range(14, 25)
    ]
    return markdown_table(["layers that read all", *columns], lines)


HELD_OUT = Experiment(
    name="auto_budget_held_out",
    title="The automatic budget and its words, on texts that chose neither",
    takes="a day",
    measure=_measure_held_out,
    cases=lambda given, _: held_out(given.loaded.tokenizer, range(given.first, given.rounds)),
    options={"first": Sized(0, 0), "rounds": Sized(8, 1)},
    measured=last_run,
    tables=_held_out_tables,
)
