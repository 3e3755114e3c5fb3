"""Every method side by side at equal budgets: right answers, bytes and time per token."""

import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from statistics import fmean

import torch

from snapkv import FullCache
from snapkv.app.models import LoadedModel
from snapkv.policies import AdaKV, KeyDiff, KVzip, Policy, Random
from snapkv.policies.kvzip import INSTRUCTION
from snapkv_lab.evaluate.haystack import Haystack, load_haystack
from snapkv_lab.experiments.contenders import (
    BUDGETLESS,
    FULL,
    WINDOW_SIZE,
    around_wide_pooling,
    contenders_at,
    full_cache,
    questionless_at,
    read_twice_at,
    rkv_at,
    without_budget,
)
from snapkv_lab.experiments.decode import decoder
from snapkv_lab.experiments.experiment import Experiment, Given, Shown, cell, of, pivot, table
from snapkv_lab.experiments.magic_number import SEED, Document, make_documents, stretch
from snapkv_lab.experiments.reading import ReadPrompt, read_prompt, read_prompt_twice, score_answer
from snapkv_lab.experiments.records import Row, environment_line, markdown_table
from snapkv_lab.experiments.retrieval import Outcome, Question, measure_retrieval
from snapkv_lab.measure.timing import alternate, ratios, spread

FOLLOWED_TOKENS, FOLLOWED_BUDGETS, SINKS = 768, (64, 192, 384), (0, 4)
STRETCHES, FOLLOWING_TOKENS = 8, 256


def with_sinks(budget: int, sink_tokens: int) -> dict[str, Policy]:
    """Methods that look at no question, with so many sinks."""
    kvzip = KVzip(budget, window_size=WINDOW_SIZE, sink_tokens=sink_tokens)
    return {
        "KVzip": kvzip,
        "AdaKV(KVzip)": AdaKV(kvzip),
        "KeyDiff": KeyDiff(budget, window_size=WINDOW_SIZE, sink_tokens=sink_tokens),
        "Random": Random(budget, window_size=WINDOW_SIZE, sink_tokens=sink_tokens),
    }


def measure_first_tokens(loaded: LoadedModel, haystack: Haystack) -> Iterator[Row]:
    """The loss of what follows a text, from every cache."""
    compared: list[tuple[str, int | None, int | None, Policy]] = [
        ("full cache", None, None, FullCache()),
        *(
            (name, budget, sinks, policy)
            for budget in FOLLOWED_BUDGETS
            for sinks in SINKS
            for name, policy in with_sinks(budget, sinks).items()
        ),
    ]
    losses: list[list[float]] = [[] for _ in compared]
    repeat = loaded.tokenizer(INSTRUCTION, add_special_tokens=False)["input_ids"]
    for number in range(STRETCHES):
        print(f"text {number + 1} of {STRETCHES}", file=sys.stderr)
        draw = random.Random(f"{SEED}/first tokens/{number}")
        ids = stretch(loaded.tokenizer, haystack.text, FOLLOWED_TOKENS + FOLLOWING_TOKENS, draw)
        prompt = read_prompt_twice(
            loaded.model, ids[:FOLLOWED_TOKENS], policy=KVzip(), instruction_ids=repeat
        )
        for (*_, policy), of_policy in zip(compared, losses, strict=True):
            score = score_answer(prompt, prompt.compressed(policy), ids[FOLLOWED_TOKENS:])
            of_policy.append(score.nll / (FOLLOWING_TOKENS - 1))
    for (name, budget, sinks, policy), of_policy in zip(compared, losses, strict=True):
        yield {
            "task": "text that follows",
            "prompt_tokens": FOLLOWED_TOKENS,
            "following_tokens": FOLLOWING_TOKENS,
            "texts": STRETCHES,
            "method": name,
            "budget": budget,
            "sink_tokens": sinks,
            "policy": policy.describe(),
            "loss": round(fmean(of_policy), 4),
            "losses": [round(loss, 4) for loss in of_policy],
        }


def _first_tokens(rows: list[Row]) -> list[str]:
    """Loss by method, budget and sinks, that of the full cache first."""
    losses = {(row["method"], row["budget"], row["sink_tokens"]): row["loss"] for row in rows}
    columns = [(budget, sinks) for budget in FOLLOWED_BUDGETS for sinks in SINKS]
    methods = list(dict.fromkeys(row["method"] for row in rows if row["budget"]))
    table = markdown_table(
        ["method", *(f"{budget} tokens, {sinks} sinks" for budget, sinks in columns)],
        [
            ["full cache", *[f"{rows[0]['loss']:.3f}"] * len(columns)],
            *([name, *(f"{losses[name, *column]:.3f}" for column in columns)] for name in methods),
        ],
    )
    return ["## First tokens", table]


BUDGETS = {768: (64, 192, 384), 2048: (128, 512, 1024)}
"""Tokens per layer and KV head, on average, at each prompt length: half of it, a quarter, and a
twelfth or a sixteenth."""

DOCUMENTS = {768: 8, 2048: 8}
QUESTIONS: tuple[Question, ...] = ("visible", "hidden")

POOLED_PROMPT_TOKENS, POOLED_BUDGETS = 2048, (128, 512)

TIMED_PROMPT_TOKENS, TIMED_BUDGET, TIMED_TOKENS = 2048, 512, 48

BYTES_TOLERANCE = 0.04
"""Every method holds the budget exactly, with one exception: StreamingLLM in cache positions has a
second copy of the keys of its 4 sinks, which at the smallest budget of 64 tokens is 3 % more.
Methods without a budget come as near to it as they can, and are not held to it."""


Named = tuple[str, int | None, Policy]
"""A method's name, its budget, and what it is."""


def _documents(loaded: LoadedModel, haystack: Haystack, tokens: int) -> list[Document]:
    return make_documents(loaded.tokenizer, haystack, prompt_tokens=tokens, count=DOCUMENTS[tokens])


def _at(budgets: Sequence[int], made: Callable[[int], dict[str, Policy]]) -> list[Named]:
    return [(name, budget, policy) for budget in budgets for name, policy in made(budget).items()]


def _answered(
    loaded: LoadedModel,
    documents: list[Document],
    contenders: Sequence[Named],
    question: Question,
    read: Callable[[list[int]], ReadPrompt] | None = None,
) -> Iterator[Row]:
    """A row for each contender; those that can hold a budget exactly must."""
    tokens, policies = len(documents[0].prompt_ids), [policy for *_, policy in contenders]
    told = _told(documents, question)
    outcomes = measure_retrieval(loaded.model, told, policies, question=question, read=read)
    for (name, budget, _), outcome in zip(contenders, outcomes, strict=True):
        if budget is not None and name not in BUDGETLESS:
            require_budget_bytes(name, outcome, budget)
        yield {
            "task": "magic number",
            "prompt_tokens": tokens,
            "question": question,
            "method": name,
            "budget": budget,
            "policy": outcome.policy.describe(),
            "documents": outcome.documents,
            "accuracy": round(outcome.accuracy, 4),
            "nll": round(outcome.nll, 4),
            "read_tokens": outcome.read_tokens,
            "held_bytes": outcome.held_bytes,
            "full_bytes": outcome.full_bytes,
            "end_bytes": outcome.end_bytes,
            "bytes_tolerance": BYTES_TOLERANCE,
        }


def _told(documents: list[Document], question: Question) -> Iterator[Document]:
    for number, document in enumerate(documents, 1):
        tokens = len(document.prompt_ids)
        print(f"{tokens} tokens, question {question}: document {number}", file=sys.stderr)
        yield document


def require_budget_bytes(name: str, outcome: Outcome, budget: int) -> None:
    """Raise unless the method held the bytes of that many tokens after what it compressed."""
    expected = outcome.full_bytes * budget / outcome.read_tokens
    if abs(outcome.held_bytes / expected - 1) > BYTES_TOLERANCE:
        raise ValueError(f"{name}: expected {expected:.0f} bytes, got {outcome.held_bytes}")


def measure_quality(loaded: LoadedModel, haystack: Haystack) -> Iterator[Row]:
    """Answers of every method, at every length, question and budget."""
    for tokens in DOCUMENTS:
        made = functools.partial(_contenders, loaded, tokens)
        full: list[Named] = [(name, None, policy) for name, policy in full_cache().items()]
        for question in QUESTIONS:
            contenders = [*full, *_at(BUDGETS[tokens], made)]
            documents = _documents(loaded, haystack, tokens)
            yield from _answered(loaded, documents, contenders, question)


def measure_pooling(loaded: LoadedModel, haystack: Haystack) -> Iterator[Row]:
    """Answers of the methods around SnapKV where SnapKV pools widely."""
    documents = _documents(loaded, haystack, POOLED_PROMPT_TOKENS)
    contenders = _at(POOLED_BUDGETS, around_wide_pooling)
    yield from _answered(loaded, documents, contenders, "visible")


def measure_second_reading(loaded: LoadedModel, haystack: Haystack) -> Iterator[Row]:
    """Answers of the methods that read the text twice, before the question."""
    repeat = loaded.tokenizer(INSTRUCTION, add_special_tokens=False)["input_ids"]
    for tokens in DOCUMENTS:
        contenders = _at(BUDGETS[tokens], read_twice_at)
        read = functools.partial(
            read_prompt_twice, loaded.model, policy=contenders[0][-1], instruction_ids=repeat
        )
        documents = _documents(loaded, haystack, tokens)
        yield from _answered(loaded, documents, contenders, "hidden", read)


def measure_later(
    made: Callable[[int], dict[str, Policy]], loaded: LoadedModel, haystack: Haystack
) -> Iterator[Row]:
    """Answers of methods that came later, by budget, at every length, question and budget."""
    for tokens in DOCUMENTS:
        documents, contenders = _documents(loaded, haystack, tokens), _at(BUDGETS[tokens], made)
        for question in QUESTIONS:
            yield from _answered(loaded, documents, contenders, question)


def _contenders(loaded: LoadedModel, prompt_tokens: int, budget: int) -> dict[str, Policy]:
    return {
        **contenders_at(budget),
        **without_budget(prompt_tokens, budget, loaded.tokenizer),
    }


@torch.inference_mode()
def measure_timing(loaded: LoadedModel, haystack: Haystack) -> Iterator[Row]:
    """Times per token of every method; all caches decode in turn, one token each."""
    document, *_ = make_documents(
        loaded.tokenizer, haystack, prompt_tokens=TIMED_PROMPT_TOKENS, count=1
    )
    prompt = read_prompt(loaded.model, document.prompt_ids, recorded_queries=TIMED_PROMPT_TOKENS)
    policies = {**full_cache(), **_contenders(loaded, TIMED_PROMPT_TOKENS, TIMED_BUDGET)}
    caches = {name: prompt.compressed(policy) for name, policy in policies.items()}
    reports = {name: cache.report() for name, cache in caches.items()}
    times = alternate(
        {name: decoder(prompt, cache) for name, cache in caches.items()},
        rounds=TIMED_TOKENS,
        warmup_rounds=4,
    )
    for name, samples in times.items():
        yield {
            "task": "decoding",
            "prompt_tokens": TIMED_PROMPT_TOKENS,
            "method": name,
            "budget": None if name == FULL else TIMED_BUDGET,
            "policy": policies[name].describe(),
            "tokens": TIMED_TOKENS,
            "ms_per_token": spread(samples, 2),
            "against_full": spread(ratios(samples, times[FULL]), 4),
            "held_bytes": reports[name].held_bytes,
            "index_bytes": reports[name]["index_bytes"],
            "full_bytes": reports[name].full_bytes,
        }


_PARTS: dict[str, Callable[[LoadedModel, Haystack], Iterator[Row]]] = {
    "quality": measure_quality,
    "pooling": measure_pooling,
    "second reading": measure_second_reading,
    "r-kv": functools.partial(measure_later, rkv_at),
    "no question": functools.partial(measure_later, questionless_at),
    "first tokens": measure_first_tokens,
    "timing": measure_timing,
}


def measure(given: Given) -> Iterator[Row]:
    """Some parts, one after the other."""
    haystack = load_haystack()
    for part in given.parts:
        for row in _PARTS[part](given.loaded, haystack):
            yield {**row, "part": part, "haystack": haystack.name, "seed": SEED}


MEASURED_LATER = {
    "second reading": "The methods that read twice",
    "r-kv": "R-KV",
    "no question": "LagKV and Compactor",
}
"""Parts whose rows stand in the tables of "quality", and whose they are."""


def _line(rows: list[Row]) -> str:
    titles = {"quality": "", **{part: f"{who}: " for part, who in MEASURED_LATER.items()}}
    titles |= {part: f"{part}: " for part in ("pooling", "first tokens", "timing")}
    found = {title: of(rows, part=part) for part, title in titles.items()}
    return "; ".join(f"{title}{environment_line(own)}" for title, own in found.items() if own)


def _tables(rows: list[Row]) -> Iterator[str]:
    parts = ("quality", *MEASURED_LATER)
    answered = [row for part in parts for row in of(rows, part=part)]
    for tokens in sorted({row["prompt_tokens"] for row in answered}):
        yield from _length(of(answered, prompt_tokens=tokens))
    yield "## The order of the methods"
    yield _order(answered)
    if own := of(rows, part="pooling"):
        yield f"## Around wide pooling, {own[0]['prompt_tokens']:,} tokens"
        yield pivot(own, "method, kernel 13", "{method}", "visible, {budget}", _CELL)
    if own := of(rows, part="first tokens"):
        yield from _first_tokens(own)
    if own := of(rows, part="timing"):
        yield "## Bytes and time per token"
        yield table(
            own,
            {
                "cache": "{method}",
                "keys and values": "{held_bytes:bytes}",
                "held beside them": "{index_bytes:bytes}",
                "ms per token": "{ms_per_token[p50]:.1f}",
                "against the full cache": "{against_full:spread|.2f}",
            },
        )


_CELL = "{accuracy:.2f} ({nll:.2f})"


def _length(rows: list[Row]) -> Iterator[str]:
    """One prompt length: methods by question and budget, and what those without one held."""
    budgets = sorted({row["budget"] for row in rows if row["budget"]})
    columns = [(question, budget) for question in QUESTIONS for budget in budgets]
    cells: dict[str, dict[tuple[str, int | None], Row]] = {}
    for row in rows:
        cells.setdefault(row["method"], {})[row["question"], row["budget"]] = row
    full = cells.pop(FULL)
    snapkv = next(iter(cells.values()))
    yield f"## {rows[0]['prompt_tokens']:,} tokens, {rows[0]['documents']} documents"
    yield markdown_table(
        ["method", *(f"{question}, {budget}" for question, budget in columns)],
        [
            [FULL, *(cell(_CELL, full[question, None]) for question, _ in columns)],
            *(
                [name, *(cell(_CELL, own[key]) if key in own else "" for key in columns)]
                for name, own in cells.items()
            ),
            ["keys and values held", *(cell("{held_bytes:bytes}", snapkv[key]) for key in columns)],
        ],
    )
    yield f"### FastGen, which has no budget, at {rows[0]['prompt_tokens']:,} tokens"
    yield table(
        of(rows, method="FastGen", question="visible"),
        {
            "in the place of": "{budget}",
            "recovery": "{policy[recovery]}",
            "tokens held": lambda row: f"{held_tokens(row):.0f}",
        },
    )


def held_tokens(row: Row) -> float:
    """Tokens per layer and KV head that the bytes held have room for, on average."""
    return float(row["held_bytes"] / row["full_bytes"] * row["read_tokens"])


def mean_nll(rows: list[Row], question: Question) -> dict[str, float]:
    """Each method's NLL, the mean over prompt lengths and budgets, best first."""
    own = [row for row in of(rows, question=question) if row["method"] != FULL]
    means = {
        method: fmean(row["nll"] for row in of(own, method=method))
        for method in dict.fromkeys(row["method"] for row in own)
    }
    return dict(sorted(means.items(), key=lambda item: item[1]))


def _order(rows: list[Row]) -> str:
    """The methods from best to worst in both settings."""
    orders = [list(mean_nll(rows, question).items()) for question in QUESTIONS]
    lines = [
        [str(place), *(f"{method}: {nll:.2f}" for method, nll in pair)]
        for place, pair in enumerate(zip_longest(*orders, fillvalue=("", 0.0)), 1)
    ]
    return markdown_table(["place", "question visible", "question hidden"], lines)


EXPERIMENT = Experiment(
    name="methods",
    title="Methods side by side, at equal budgets",
    takes="hours",
    measure=measure,
    parts=tuple(_PARTS),
    measured=_line,
    tables=_tables,
    shown={
        "hidden": Shown(
            "2,048 tokens, 8 documents",
            ("method", "hidden, 128", "hidden, 512", "hidden, 1024"),
            ("full cache", "AdaKV(KVzip)", "KVzip", "Compactor", "KeyDiff", "SnapKV, kernel 13"),
        ),
        "slow": Shown(
            "Bytes and time per token",
            ("cache", "ms per token", "against the full cache"),
            ("full cache", "SnapKV, kernel 7", "AdaKV(SnapKV)", "H2O", "FastGen", "Scissorhands"),
        ),
        "visible": Shown(
            "2,048 tokens, 8 documents",
            ("method", "visible, 128", "visible, 512", "visible, 1024"),
            (
                "full cache",
                "SnapKV, kernel 13",
                "SnapKV, kernel 7",
                "R-KV",
                "TOVA",
                "H2O",
                "Random",
            ),
        ),
        "sinks": Shown("First tokens", ("method", "64 tokens, 0 sinks", "64 tokens, 4 sinks")),
    },
)


if __name__ == "__main__":
    EXPERIMENT.main()
