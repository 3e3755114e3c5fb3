"""The cases: one choice along every axis. Any choice of one axis goes with any of the others."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from snapkv import (
    H2O,
    RKV,
    TOVA,
    AdaKV,
    Compactor,
    CriticalKV,
    ExpectedAttention,
    FastGen,
    FullCache,
    KeyDiff,
    KVzip,
    LagKV,
    PromptThenDecode,
    PyramidKV,
    Random,
    Scissorhands,
    SnapKV,
    StreamingLLM,
)
from snapkv.policies import Policy
from tests.golden.models import MODELS

BUDGET = 24
_WINDOW = {"window_size": 6}
_PICK = {**_WINDOW, "kernel_size": 5}

POLICIES: dict[str, Callable[[], Policy]] = {
    "snapkv": lambda: SnapKV(BUDGET, **_PICK),
    "snapkv-ratio": lambda: SnapKV(keep_ratio=0.4, **_PICK),
    "snapkv-avg-max": lambda: SnapKV(BUDGET, pooling="avg", group_reduce="max", **_PICK),
    "snapkv-forward": lambda: SnapKV(BUDGET, kernel_size=(0, 6), **_WINDOW),
    "snapkv-fading": lambda: SnapKV(BUDGET, pooling="fading", decay=0.8, **_WINDOW),
    "adakv-fading": lambda: AdaKV(SnapKV(BUDGET, pooling="fading", **_WINDOW)),
    "snapkv-none": lambda: SnapKV(BUDGET, group_reduce="none", **_PICK),
    "pyramidkv": lambda: PyramidKV(BUDGET, **_PICK),
    "adakv": lambda: AdaKV(SnapKV(BUDGET, **_PICK)),
    "adakv-ratio": lambda: AdaKV(SnapKV(keep_ratio=0.4, **_PICK)),
    "criticalkv": lambda: CriticalKV(SnapKV(BUDGET, **_PICK)),
    "adakv-criticalkv": lambda: AdaKV(CriticalKV(SnapKV(BUDGET, **_PICK))),
    "adakv-keydiff": lambda: AdaKV(KeyDiff(BUDGET, **_WINDOW)),
    "expected-attention": lambda: ExpectedAttention(BUDGET, **_WINDOW),
    "full": FullCache,
    "h2o": lambda: H2O(BUDGET),
    "streaming-llm": lambda: StreamingLLM(BUDGET),
    "streaming-llm-original": lambda: StreamingLLM(BUDGET, positions="original"),
    "tova": lambda: TOVA(BUDGET),
    "scissorhands": lambda: Scissorhands(BUDGET, history=16, recent=6),
    "scissorhands-slots": lambda: Scissorhands(
        BUDGET, history=6, recent=6, drop=3, threshold="slots"
    ),
    "r-kv": lambda: RKV(BUDGET, window_size=6, evict_every=4),
    "fastgen": lambda: FastGen(0.8, special_ids=(3, 4), punctuation_ids=(5, 6, 7)),
    "snapkv-then-h2o": lambda: PromptThenDecode(
        prompt=SnapKV(BUDGET, **_PICK), decode=H2O(BUDGET + 4)
    ),
    "keydiff-then-tova": lambda: PromptThenDecode(
        prompt=KeyDiff(BUDGET, **_WINDOW), decode=TOVA(BUDGET + 2)
    ),
    "keydiff": lambda: KeyDiff(BUDGET, sink_tokens=2, **_WINDOW),
    "lagkv": lambda: LagKV(BUDGET, lag_size=8, **_WINDOW),
    "adakv-lagkv": lambda: AdaKV(LagKV(BUDGET, lag_size=8, cross_scoring=True, **_WINDOW)),
    "compactor": lambda: Compactor(BUDGET, chunk_tokens=16, sink_tokens=4, **_WINDOW),
    "kvzip": lambda: KVzip(BUDGET, chunk_tokens=32, **_WINDOW),
    "adakv-kvzip": lambda: AdaKV(KVzip(BUDGET, chunk_tokens=32, **_WINDOW)),
    "adakv-kvzip-plus": lambda: AdaKV(KVzip(BUDGET, chunk_tokens=32, plus=True, **_WINDOW)),
    "random": lambda: Random(BUDGET, sink_tokens=2, **_WINDOW),
}
TWICE_READERS = ("kvzip", "adakv-kvzip", "adakv-kvzip-plus")
STORAGES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"storage": "static", "room_tokens": 64},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "fp8": {"quantize": "fp8"},
    "static-int8": {"storage": "static", "room_tokens": 64, "quantize": "int8"},
}
TURNS: dict[str, dict[str, Any]] = {
    "append": {},
    "compress": {"turns": "compress"},
    "recall": {"recall": "host"},
    "recall-append": {"recall": "host", "turns": "append"},
    "folder": {"recall": "folder", "recall_bytes": 2_000_000},
    "little": {"recall": "host", "recall_bytes": 2_000},
    "refresh": {"recall": "host", "refresh_every": 3},
}
ROWS = ("one", "padded")
READINGS = ("whole", "pieces", "told", "capped", "layerwise", "twice")
THEN = (
    "turns",
    "answer",
    "lookup",
    "speculation",
    "medusa",
    "beams",
    "rows",
    "crop",
    "reset",
    "save",
    "copy",
    "document",
)


@dataclass(frozen=True)
class Case:
    """One choice per axis; the first of each axis is its default."""

    model: str = MODELS[0]
    policy: str = "snapkv"
    storage: str = "dynamic"
    turns: str = "append"
    rows: str = "one"
    reading: str = "whole"
    then: str = THEN[0]

    def __str__(self) -> str:
        return "/".join(getattr(self, axis) for axis in AXES)

    @property
    def special(self) -> tuple[tuple[str, str], ...]:
        """The axes whose choice is not the default, and the choice."""
        chosen = ((axis, getattr(self, axis)) for axis in AXES)
        return tuple((axis, choice) for axis, choice in chosen if choice != AXES[axis][0])

    @property
    def pairs(self) -> frozenset[tuple[str, str, str, str]]:
        """Every two choices that meet here."""
        choices = [(axis, getattr(self, axis)) for axis in AXES]
        return frozenset((*one, *other) for one, other in itertools.combinations(choices, 2))

    @property
    def suspects(self) -> list[tuple[str, str, str, str]]:
        """The two choices of one of `two_choices` that make it what it is."""
        special = dict(self.special)
        if special.keys() <= {"policy", "reading"}:
            return [("policy", self.policy, "reading", self.reading)]
        if self.policy in TWICE_READERS and len(special) == 3:
            special.pop("reading")
        one, *other = special.items()
        return [(*one, *other[0])] if len(other) == 1 else []

    @property
    def makes_sense(self) -> bool:
        """Whether every choice has an effect that no other one takes away."""
        choices = [getattr(self, axis) for axis in AXES]
        if _ALONE.intersection(choices):
            return len(self.special) == 1
        if self.then == "document":
            own = self.turns in ("append", "recall", "folder") and self.reading != "twice"
            plain = self.storage == "dynamic" and self.rows == "one"
            return own and plain and self.reading in ("whole", "pieces")
        if self.reading == "twice":
            return self.rows == "one"
        return not (self.reading == "told" and self.then in _INSIDE_GENERATE)


_ALONE = frozenset(("recall-append", "static-int8", "little"))  # refused whatever goes with them
_INSIDE_GENERATE = ("lookup", "speculation", "medusa", "beams")
AXES: dict[str, tuple[str, ...]] = {
    "model": MODELS,
    "policy": tuple(POLICIES),
    "storage": tuple(STORAGES),
    "turns": tuple(TURNS),
    "rows": ROWS,
    "reading": READINGS,
    "then": THEN,
}
assert tuple(AXES) == tuple(field.name for field in fields(Case))


def parse(text: str) -> Case:
    """The case that has this name."""
    return Case(*text.split("/"))


def is_known(text: str) -> bool:
    """Whether every choice of that name is still one."""
    return all(part in AXES[axis] for axis, part in zip(AXES, text.split("/"), strict=True))


def two_choices() -> list[Case]:
    """Any two choices, all else being the default: what refuses what shows here undisguised."""
    found = {str(Case()): Case()}
    for one, other in itertools.combinations(AXES, 2):
        for first, second in itertools.product(AXES[one], AXES[other]):
            case = replace(Case(), **{one: first, other: second})
            if case.policy in TWICE_READERS and "reading" not in (one, other):
                case = replace(case, reading="twice")
            if case.makes_sense:
                found[str(case)] = case
    return list(found.values())


def drawn(seed: int) -> Iterator[Case]:
    """Cases out of the whole product, at random, without an end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        numbers = torch.randint(0, 2**31, (len(AXES),), generator=generator).tolist()
        chosen = (
            choices[number % len(choices)]
            for number, choices in zip(numbers, AXES.values(), strict=True)
        )
        case = Case(*chosen)
        if case.makes_sense:
            yield case


def covering(
    refused: frozenset[tuple[str, str, str, str]],
    met: frozenset[tuple[str, str, str, str]] = frozenset(),
    tries: int = 60,
) -> list[Case]:
    """Few cases in which every two choices meet that may, none of them a refused pair.

    Args:
        refused: pairs of choices that the library refuses.
        met: pairs that need not meet again.
        tries: candidates for each case; the one with most new pairs is taken.
    """
    wanted: set[tuple[str, str, str, str]] = set()
    for case in two_choices():
        wanted |= case.pairs - refused - met
    cases, draws = [], drawn(0)
    chosen: Case | None
    for chosen in _towards(wanted, draws, refused, tries):
        cases.append(chosen)
        wanted -= chosen.pairs
    return cases


def _readable(case: Case) -> Case:
    """The case, read twice where its policy needs that."""
    return replace(case, reading="twice", rows="one") if case.policy in TWICE_READERS else case


def _towards(
    wanted: set[tuple[str, str, str, str]],
    draws: Iterator[Case],
    refused: frozenset[tuple[str, str, str, str]],
    tries: int,
) -> Iterator[Case]:
    """Cases with many of the wanted pairs, until none is left that can be had."""
    for goal in sorted(wanted):
        if goal not in wanted:
            continue
        axis, choice, other, second = goal
        candidates = [
            _readable(replace(case, **{axis: choice, other: second}))
            for case in itertools.islice(draws, 20 * tries)
        ]
        fit = [
            case
            for case in candidates
            if goal in case.pairs and case.makes_sense and not case.pairs & refused
        ]
        if fit:
            yield max(fit[:tries], key=lambda case: len(case.pairs & wanted))
