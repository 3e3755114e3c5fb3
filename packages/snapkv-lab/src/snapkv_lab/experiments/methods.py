"""Every method side by side at equal budgets: right answers.

The texts of `per_byte` with other numbers, each question once after its text and once hidden until
the text is compressed. Methods have their own defaults; FastGen has no budget and takes no part.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch

from snapkv import default_policy
from snapkv.policies import (
    H2O,
    RKV,
    TOVA,
    AcrossLayers,
    AdaKV,
    CriticalKV,
    ExpectedAttention,
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
from snapkv_app.observing import RecordedPrompt
from snapkv_lab.experiments.experiment import Experiment, RunContext, Size
from snapkv_lab.experiments.pages import Listing
from snapkv_lab.experiments.prompts import read_prompt_twice
from snapkv_lab.experiments.texts import (
    AskedPrompt,
    QuestionedText,
    ReadText,
    answers_of,
    questions,
    right_and_loss,
    scored,
    texts_from,
    with_answers,
)
from snapkv_lab.report.tables import Pivot
from snapkv_lab.rows import Row, grouped

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
def _answers(given: RunContext, text: QuestionedText) -> Iterator[Row]:
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
            if policy.needs_reconstruction_pass:
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
