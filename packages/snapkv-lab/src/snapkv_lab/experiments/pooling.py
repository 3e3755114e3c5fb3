"""Which pooling of the votes, and which window: right answers and loss at equal budgets.

The kinds of texts that the default was chosen by, and RULER's variables; budgets are shares of the
prompt's tokens.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from snapkv import SnapKV, default_policy
from snapkv.app.observing import RecordedPrompt
from snapkv_lab.experiments.experiment import Experiment, Given, Sized
from snapkv_lab.experiments.pages import Pivot, Table
from snapkv_lab.experiments.records import Row, grouped
from snapkv_lab.experiments.texts import (
    Case,
    Maker,
    Text,
    answers_of,
    questions,
    right_and_loss,
    scored,
    texts_from,
)

SHARES = {"1/16": 1 / 16, "1/8": 1 / 8, "1/4": 1 / 4}
_FADING = {"pooling": "fading", "decay": 0.935}
SETTINGS: dict[str, Any] = {
    "default: window 16, fading 0.935, 4 sinks": default_policy,
    "window 16, fading 0.935, no sinks": partial(SnapKV, window_size=16, **_FADING),
    "window 16, fading 0.90, 4 sinks": partial(default_policy, decay=0.90),
    "window 8, fading 0.935, 4 sinks": partial(default_policy, window_size=8),
    "window 32, fading 0.935, 4 sinks": partial(default_policy, window_size=32),
    "window 16, 0+6": partial(SnapKV, window_size=16, kernel_size=(0, 6)),
    "window 16, 0+12": partial(SnapKV, window_size=16, kernel_size=(0, 12)),
    "window 16, centred 7": partial(SnapKV, window_size=16, kernel_size=7),
    "window 16, centred 13": partial(SnapKV, window_size=16, kernel_size=13),
    "paper's: window 32, centred 7": partial(SnapKV, window_size=32, kernel_size=7),
}
VARIABLES = "RULER vt"


def _texts(given: Given, part: str) -> Iterator[Text]:
    yield from texts_from(given, 400)
    yield from Maker(given.loaded.tokenizer).ruler("vt", given.tokens, given.rounds)


def _measure(given: Given, text: Text) -> Iterator[Row]:
    def answers(prompt: RecordedPrompt, case: Case) -> Iterator[Row]:
        for share, keep_ratio in SHARES.items():
            for name, policy in SETTINGS.items():
                cache = prompt.compressed(policy(keep_ratio=keep_ratio))
                yield {"share": share, "setting": name} | scored(prompt, cache, case)

    return questions(given.loaded.model, text, answers)


def _cells(answers: Iterable[Row]) -> Iterator[Row]:
    for (name, share), own in grouped(answers, lambda row: (row["setting"], row["share"])).items():
        yield {"setting": name, "share": share, "right": right_and_loss(own)}


def _tables(rows: list[Row]) -> Iterator[str]:
    variables, others = [], []
    for each in answers_of(rows):
        (variables if each["of"]["group"] == VARIABLES else others).append(each)
    for title, own in {"All kinds together": others, "Variables": variables}.items():
        pivot = Pivot("setting", "{setting}", "{share}", "{right}")
        yield from Table(pivot, title, made=lambda _, own=own: _cells(own)).parts(rows)


POOLING = Experiment(
    name="pooling",
    title="Which pooling, which window",
    takes="an hour",
    measure=_measure,
    cases=_texts,
    options={"tokens": Sized(1024, 768), "rounds": Sized(9, 1)},
    tables=_tables,
)
