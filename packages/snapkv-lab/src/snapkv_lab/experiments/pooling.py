"""Which pooling of the votes, and which window: right answers and loss at equal budgets.

A row is one question about one text: what the full cache answers, and what every setting does. The
rows also have parts "screening", "sinks", "more" and "back", the poolings that led to these and
lost, and in each answer the mass of votes that was not kept; these are no longer measured.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, ClassVar

from torch import Tensor

from snapkv import SnapKV
from snapkv.app.observing import RecordedPrompt
from snapkv_lab.evaluate.tasks.ruler import GENERATORS
from snapkv_lab.experiments.experiment import Experiment, Given, Sized
from snapkv_lab.experiments.pages import markdown_table
from snapkv_lab.experiments.records import Row, grouped, of
from snapkv_lab.experiments.texts import (
    Case,
    Count,
    Maker,
    ReadText,
    Text,
    counted,
    scored,
    scored_full,
)


@dataclass(frozen=True)
class SinksStill(SnapKV):
    """The first tokens' votes lift nothing but themselves, and nothing is kept for being first."""

    name: ClassVar[str] = "snapkv"

    def _pooled(self, votes: Tensor) -> Tensor:
        others = votes.clone()
        others[..., :4] = 0
        pooled = super()._pooled(others)
        pooled[..., :4] = votes[..., :4]
        return pooled


POOLINGS: dict[str, tuple[type[SnapKV], dict[str, Any]]] = {
    "centred 7": (SnapKV, {"kernel_size": 7}),
    "centred 13": (SnapKV, {"kernel_size": 13}),
    "0+6": (SnapKV, {"kernel_size": (0, 6)}),
    "0+12, sinks still": (SinksStill, {"kernel_size": (0, 12)}),
    "fading 0.90": (SnapKV, {"pooling": "fading", "decay": 0.90}),
    "fading 0.80, sinks still": (SinksStill, {"pooling": "fading", "decay": 0.80}),
    "fading 0.935, sinks still": (SinksStill, {"pooling": "fading", "decay": 0.935}),
    "fading 0.935, 4 sinks": (SnapKV, {"pooling": "fading", "decay": 0.935, "sink_tokens": 4}),
    "fading 0.935, 1 sink": (SnapKV, {"pooling": "fading", "decay": 0.935, "sink_tokens": 1}),
}

Setting = tuple[int, str]
"""A window and a pooling."""

CHOSEN: Setting = (16, "fading 0.935, 4 sinks")
"""The default of `snapkv.policies.default`, with which the others are compared."""

SHORT = "short"
SETTINGS: dict[str, Sequence[Setting]] = {
    "main": [
        (16, "centred 7"),
        (32, "centred 7"),
        (16, "centred 13"),
        (16, "0+12, sinks still"),
        (16, "fading 0.90"),
        (8, "fading 0.935, sinks still"),
        (16, "fading 0.935, sinks still"),
        (32, "fading 0.935, sinks still"),
    ],
    "kept": [CHOSEN, (16, "fading 0.935, 1 sink")],
    SHORT: [(16, "0+6"), (16, "fading 0.80, sinks still")],
}
"""By the parts of the study; the last is only asked where what stands before a vote is wanted."""


def policy_of(setting: Setting, budget: int) -> SnapKV:
    kind, own = POOLINGS[setting[1]]
    return kind(budget, window_size=setting[0], **{"sink_tokens": 0} | own)


def _texts(given: Given, part: str) -> Iterator[Text]:
    make, rounds = Maker(given.loaded.tokenizer), range(10, 10 + given.rounds)
    if part == SHORT:
        return _traced(make, given.tokens, rounds)
    return _all_kinds(make, given.tokens, rounds)


def _all_kinds(make: Maker, size: int, rounds: range) -> Iterator[Text]:
    """Round after round, so that a run that is stopped has some of every kind."""
    tracing = make.ruler("vt", size, len(rounds))
    turns = itertools.cycle(make.ruler(t, size, len(rounds)) for t in GENERATORS if t != "vt")
    for index in rounds:
        yield make.needles(size, index, turns=True)
        yield make.lines(size, index, questions=2)
        yield make.quotes(size, index, questions=3)
        yield make.rag(6, index, questions=3)
        yield next(tracing)
        yield from (next(next(turns)) for _ in range(5))
        yield make.prose(size, 32, index)
        yield make.code(size, 32, index)
        if index % 4 == 0:
            yield make.needles(2 * size, index, turns=False)


def _traced(make: Maker, size: int, rounds: range) -> Iterator[Text]:
    """Where what stands before a vote is wanted, and a few others beside."""
    yield from make.ruler("vt", size, 6)
    for index in rounds[:2]:
        yield make.needles(size, index, turns=True)
        yield make.lines(size, index, questions=2)
        yield make.quotes(size, index, questions=3)


def _measure(settings: Sequence[Setting], given: Given, text: Text) -> Iterator[Row]:
    """The row of each question: what the full cache and every setting answer."""
    read = ReadText(given.loaded.model, text.ids)
    for number, case in enumerate(text.cases):
        prompt = read.asked(case.question_ids)
        full = scored_full(prompt, case)
        says_something = any(full["right"]) or not full["right"]  # settings can be told apart
        yield {
            "text": text.name,
            "question": number,
            "group": case.group,
            "setting": case.setting,
            "prompt_tokens": prompt.prompt_tokens,
            "answer_tokens": len(case.answer_ids),
            "full": full,
            "answers": list(_answers(prompt, case, settings)) if says_something else [],
        }


def _answers(
    prompt: RecordedPrompt, case: Case, settings: Sequence[Setting]
) -> Iterator[list[object]]:
    """Share, budget, window, pooling, right, nll; a budget must have room for the window."""
    for share in (32, 16, 8, 4):
        budget = prompt.prompt_tokens // share
        for window, name in settings:
            if window < budget:
                cache = prompt.compressed(policy_of((window, name), budget))
                found = scored(prompt, cache, case)
                yield [share, budget, window, name, found["right"], found["nll"]]


def answers_of(rows: Iterable[Row]) -> Iterator[Row]:
    """What each setting answered to each question at each budget.

    "counted": of the parts of the answer that the full cache has right, which are right here.
    "above": the loss above the full cache's; None where the answer has one token.
    """
    for row in rows:
        for share, _, window, name, right, nll, *_ in row.get("answers", ()):
            full = row["full"]
            yield {
                "group": row["group"],
                "question": f"{row['text']}/{row['question']}",
                "share": share,
                "setting": (window, name),
                "counted": [own for own, whole in zip(right, full["right"], strict=True) if whole],
                "above": None if None in (nll, full["nll"]) else nll - full["nll"],
            }


def count(answers: Iterable[Row]) -> Count:
    """How many parts are right of those that the full cache has right."""
    return counted(right for answer in answers for right in answer["counted"])


_FAMILIES = {
    "Questions that did not vote": ("needles, hidden question", "needles, second question"),
    "Lines": ("lines",),
    "Quotations": ("quotations",),
    "Documents": ("rag",),
    "Natural text and code": ("prose", "code"),
}


def _family(answer: Row) -> str:
    if answer["group"].startswith("RULER"):
        return "RULER"
    return next((name for name, own in _FAMILIES.items() if answer["group"] in own), "Needles")


def _tables(rows: list[Row]) -> Iterator[str]:
    main, kept, short = (list(answers_of(of(rows, part=part))) for part in SETTINGS)
    compared = _common(main, kept) if kept else main
    traced = _common(compared, short)
    variables = of(traced, group="RULER vt")
    others = [answer for answer in traced if answer["group"] != "RULER vt"]
    sections = {
        "All groups together": _by_budget(compared),
        **{name: _by_budget(own) for name, own in grouped(compared, _family).items()},
        f"Variables, {len(grouped(variables, 'question'))} samples": _by_budget(variables),
        f"The same settings, {len(grouped(others, 'question'))} other questions": _by_budget(
            others
        ),
        **_groups(of(rows, part="main"), compared),
    }
    return (part for name, own in sections.items() for part in (f"## {name}", own))


def _common(ones: list[Row], others: list[Row]) -> list[Row]:
    """Both, where both were asked."""
    both = grouped(ones, "question").keys() & grouped(others, "question").keys()
    return [answer for answer in [*ones, *others] if answer["question"] in both]


def _named(setting: Setting) -> str:
    return f"window {setting[0]}, {setting[1]}"


def _by_budget(answers: Sequence[Row]) -> str:
    """Settings by budgets; a budget has room for a setting if all of its answers are there."""
    cells = grouped(answers, lambda answer: (answer["setting"], answer["share"]))
    shares = sorted({share for _, share in cells}, reverse=True)
    most = {at: max(len(own) for (_, share), own in cells.items() if share == at) for at in shares}

    def told(setting: Setting, share: int) -> str:
        own = cells.get((setting, share), [])
        return _right_and_loss(own) if len(own) == most[share] else "no room"

    return markdown_table(
        ["setting", *(f"1/{share}" for share in shares)],
        [
            [_named(setting), *(told(setting, share) for share in shares)]
            for setting in grouped(answers, "setting")
        ],
    )


def _right_and_loss(answers: Sequence[Row]) -> str:
    found, above = count(answers), [each["above"] for each in answers if each["above"] is not None]
    return ", ".join([f"{found}"] * (found.of > 0) + [f"{fmean(above):+.2f}"] * bool(above))


def _groups(rows: list[Row], answers: list[Row]) -> dict[str, str]:
    found, of_group = {}, grouped(answers, "group")
    for group, own in grouped(rows, "group").items():
        rights = [right for row in own for right in row["full"]["right"]]
        of_full = f", {sum(rights)} of {len(rights)} right" if rights else ""
        loss = fmean(row["full"]["nll"] for row in own if row["full"]["nll"] is not None)
        if group in of_group:
            title = f"Group {group}: {len(own)} questions, full cache{of_full}, loss {loss:.2f}"
            found[title] = _by_budget(of_group[group])
    return found


POOLING = Experiment(
    name="pooling",
    title="Which pooling, which window",
    takes="a day",
    measure={part: partial(_measure, settings) for part, settings in SETTINGS.items()},
    cases=_texts,
    options={"tokens": Sized(1024, 1024), "rounds": Sized(24, 1)},
    tables=_tables,
)
