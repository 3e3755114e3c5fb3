"""Every method side by side at equal budgets: right answers, and time per token.

The texts of `per_byte` with other numbers, each question once after its text and once hidden until
the text is compressed. Methods have their own defaults; FastGen, without a budget, is only timed.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch

from snapkv import FullCache, default_policy
from snapkv.app.observing import RecordedPrompt
from snapkv.policies import (
    H2O,
    RKV,
    TOVA,
    AcrossLayers,
    AdaKV,
    CriticalKV,
    ExpectedAttention,
    FastGen,
    KeyDiff,
    KVzap,
    KVzip,
    LagKV,
    Policy,
    PyramidKV,
    Random,
    Scissorhands,
    SnapKV,
    StreamingLLM,
)
from snapkv_lab.experiments.experiment import Experiment, RunContext, Size
from snapkv_lab.experiments.measuring import Turns
from snapkv_lab.experiments.pages import Listing
from snapkv_lab.experiments.prompts import decoder, read_prompt, read_prompt_twice
from snapkv_lab.experiments.texts import (
    AskedPrompt,
    ReadText,
    Text,
    answers_of,
    questions,
    right_and_loss,
    scored,
    texts_from,
    with_answers,
)
from snapkv_lab.report.tables import Pivot
from snapkv_lab.rows import Row, grouped

FULL = "full cache"
Made = Callable[[int], Policy]
"""A policy of a budget in tokens."""

BY_TEXT: dict[str, Made] = {
    "default": default_policy,
    "SnapKV": SnapKV,
    "ExpectedAttention": ExpectedAttention,
    "KeyDiff": KeyDiff,
    "LagKV": LagKV,
    "Random": Random,
}
BY_QUESTION: dict[str, Made] = {
    "PyramidKV": PyramidKV,
    "AdaKV(SnapKV)": lambda budget: AdaKV(SnapKV(budget)),
    "CriticalKV(SnapKV)": lambda budget: CriticalKV(SnapKV(budget)),
    "R-KV": partial(RKV, evict_every=16),
    "H2O": H2O,
    "TOVA": TOVA,
    "Scissorhands": partial(Scissorhands, drop=16),
    "StreamingLLM": StreamingLLM,
}
"""Votes, and what evicts at every step. Scissorhands and R-KV evict 16 tokens at a time, where
their authors' evict half of the cache and 128: so they hold about their budget at every step."""

BY_TEXT_ALONE: dict[str, Made] = {
    "KVzip": KVzip,
    "AdaKV(KVzip)": lambda budget: AdaKV(KVzip(budget)),
    "AcrossLayers(KVzip)": lambda budget: AcrossLayers(KVzip(budget)),
    "KVzap": KVzap,
    "AdaKV(KVzap)": lambda budget: AdaKV(KVzap(budget)),
    "AcrossLayers(KVzap)": lambda budget: AcrossLayers(KVzap(budget)),
}
"""Those that choose before any question is known; KVzip reads the text a second time."""

METHODS_OF = {"visible": BY_TEXT | BY_QUESTION, "hidden": BY_TEXT | BY_TEXT_ALONE}
SHARES_OF = {"visible": {"1/8": 1 / 8, "1/4": 1 / 4}, "hidden": {"1/4": 1 / 4, "1/2": 1 / 2}}


@torch.inference_mode()
def _answers(given: RunContext, text: Text) -> Iterator[Row]:
    """What every method answers, where the full cache has some of an answer right."""
    read = ReadText(given.loaded.model, text.ids)
    for setting in METHODS_OF:
        yield from questions(read, text, setting, partial(_found, given, setting))


def _found(given: RunContext, setting: str, asked: AskedPrompt) -> Iterator[list[Row]]:
    """Of every method and share a row for each question."""
    loaded, ids = given.loaded, asked.ids[0].tolist()
    read_whole: dict[object, RecordedPrompt] = {}  # by what is looked at
    for name, made in METHODS_OF[setting].items():
        for share, part in SHARES_OF[setting].items():
            policy = loaded.completed(made(round(part * len(ids))))
            prompt, needs = asked.prompt, policy.needs
            if policy.reads_context:
                if needs not in read_whole:
                    read_whole[needs] = read_prompt_twice(
                        loaded.model, loaded.tokenizer, ids, policy
                    )
                prompt = read_whole[needs]
            cache = prompt.compressed(policy)
            report = cache.report()
            held = round(report.held_bytes / report.full_bytes, 4)
            way = {"method": name, "share": share, "held": held}
            yield [way | scored(prompt, copy.copy(cache), case) for case in asked.cases]


@torch.inference_mode()
def _timing(given: RunContext) -> Iterator[Row]:
    """Times per token of every method; all caches decode in turn, one token each.

    By one thread: where steps are this small, two threads mostly wait for one
    another, which is the machine's, not the method's.
    """
    tokens, budget, new_tokens = given.timed
    prompt = read_prompt(given.loaded.model, given.prompt(tokens), recorded_queries=tokens)
    policies = {FULL: FullCache()} | {
        name: made(budget) for name, made in METHODS_OF["visible"].items()
    }
    policies["Scissorhands, half at once"] = Scissorhands(budget)
    policies["FastGen"] = given.loaded.completed(FastGen(given.recovery))
    caches = {name: prompt.compressed(policy) for name, policy in policies.items()}
    reports = {name: cache.report() for name, cache in caches.items()}
    steps = {name: decoder(prompt, cache) for name, cache in caches.items()}
    turns = Turns(steps, rounds=new_tokens, warmup_rounds=4)
    for name, report in reports.items():
        yield {
            "prompt_tokens": tokens,
            "method": name,
            "policy": policies[name].describe(),
            "tokens": new_tokens,
            "ms_per_token": turns.ms(name, 2),
            "against_full": turns.ratio(name, FULL),
            "held_bytes": report.held_bytes,
            "index_bytes": report["index_bytes"],
        }


def _cells(rows: list[Row]) -> Iterator[Row]:
    cells = grouped(
        answers_of(rows), lambda row: (row["method"], row["of"]["setting"], row["share"])
    )
    for (method, setting, share), own in cells.items():
        yield {"method": method, "place": f"{setting}, {share}", "right": right_and_loss(own)}


METHODS = Experiment(
    name="methods",
    title="Methods side by side, at equal budgets",
    takes="an hour",
    measure=_answers,
    cases=lambda given, part: with_answers(texts_from(given, 600)),
    options={"tokens": Size(1024, 512), "rounds": Size(10, 1)},
    tables=[
        Listing(
            Pivot("method", "{method}", "{place}", "{right}"),
            "Right answers, and the loss per token above the full cache's",
            made=_cells,
        ),
    ],
)

TIMES = Experiment(
    name="method_times",
    title="Bytes and time per token, by method",
    measure=_timing,
    threads=1,
    options={"timed": Size((2048, 512, 48), (192, 64, 2)), "recovery": 0.08},
    tables=[
        Listing(
            {
                "cache": "{method}",
                "keys and values": "{held_bytes:bytes}",
                "index": "{index_bytes:bytes}",
                "ms per token": "{ms_per_token[p50]:.1f}",
                "against the full cache": "{against_full:spread|.2f}",
            },
            "After {prompt_tokens:,} tokens",
        ),
    ],
)
