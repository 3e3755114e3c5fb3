"""The cases: one choice on each axis. Choices on different axes can be combined freely."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from snapkv import (
    H2O,
    RKV,
    TOVA,
    AcrossLayers,
    AdaKV,
    AutoBudget,
    CriticalKV,
    ExpectedAttention,
    FastGen,
    FullCache,
    KeyDiff,
    KVzap,
    KVzip,
    LagKV,
    PromptThenDecode,
    PyramidKV,
    Random,
    Scissorhands,
    SnapKV,
    StreamingLLM,
    default_policy,
)
from snapkv.policies import Policy
from tests.golden.models import MODELS, golden_gate

BUDGET = 24
_WINDOW = {"window_size": 6}
_PICK = {**_WINDOW, "kernel_size": 5}
_VOTED = AutoBudget(lost_vote=0.05, least=4)
_CHUNKS = {**_WINDOW, "chunk_tokens": 32}


def _kvzap(budget: int | str = BUDGET) -> KVzap:
    return KVzap(budget, gate=golden_gate(), **_WINDOW)


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
    "kvzip": lambda: KVzip(BUDGET, chunk_tokens=32, **_WINDOW),
    "adakv-kvzip": lambda: AdaKV(KVzip(BUDGET, chunk_tokens=32, **_WINDOW)),
    "adakv-kvzip-plus": lambda: AdaKV(KVzip(BUDGET, chunk_tokens=32, plus=True, **_WINDOW)),
    "random": lambda: Random(BUDGET, sink_tokens=2, **_WINDOW),
    "default": lambda: default_policy(BUDGET, **_WINDOW),
    "default-window": lambda: default_policy(BUDGET),
    "default-share": lambda: default_policy("40%", **_WINDOW),
    "default-few-bytes": lambda: default_policy("12%", **_WINDOW),
    "default-bytes": lambda: default_policy("9KiB", **_WINDOW),
    "default-votes": lambda: default_policy(_VOTED, **_WINDOW),
    "default-voters": lambda: default_policy(BUDGET, voters=20, **_WINDOW),
    "default-max": lambda: default_policy(BUDGET, voters=40, pooling="max", **_WINDOW),
    "across-layers": lambda: AcrossLayers(SnapKV(BUDGET, **_PICK)),
    "across-layers-ratio": lambda: AcrossLayers(SnapKV(keep_ratio=0.4, **_PICK)),
    "across-layers-none": lambda: AcrossLayers(SnapKV(BUDGET, group_reduce="none", **_PICK)),
    "across-layers-kvzip": lambda: AcrossLayers(KVzip(BUDGET, **_CHUNKS)),
    "across-layers-kvzap": lambda: AcrossLayers(_kvzap()),
    "across-layers-kvzap-bytes": lambda: AcrossLayers(_kvzap("12%")),
    "snapkv-share": lambda: SnapKV("40%", **_PICK),
    "snapkv-few-bytes": lambda: SnapKV("12%", **_PICK),
    "snapkv-votes": lambda: SnapKV(_VOTED, **_PICK),
    "adakv-share": lambda: AdaKV(SnapKV("40%", **_PICK)),
    "adakv-few-bytes": lambda: AdaKV(SnapKV("12%", **_PICK)),
    "adakv-votes": lambda: AdaKV(SnapKV(_VOTED, **_PICK)),
    "kvzap": _kvzap,
    "adakv-kvzap": lambda: AdaKV(_kvzap()),
}
STORAGES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "k8v4": {"quantize": "K8V4"},
}
TURNS: dict[str, dict[str, Any]] = {
    "append": {},
    "compress": {"turns": "compress"},
    "recall": {"recall": "host"},
    "folder": {"recall": "folder", "recall_bytes": 2_000_000},
    "little": {"recall": "host", "recall_bytes": 2_000},
}
ROWS = ("one", "padded")
READINGS = ("whole", "pieces", "told", "layerwise", "twice")
THEN = (
    "turns", "answer", "lookup", "medusa", "beams", "rows", "crop", "reset", "save", "copy",
    "document", "long",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A case: one choice on each axis, by default the first one."""

    model: str = MODELS[0]
    policy: str = "snapkv"
    storage: str = "dynamic"
    turns: str = "append"
    rows: str = "one"
    reading: str = "whole"
    then: str = THEN[0]

    def __str__(self) -> str:
        return "/".join(getattr(self, axis) for axis in AXES)


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
    """Return the case with this name, which lists the choices on the axes."""
    case = Case(*text.split("/"))
    for axis, choices in AXES.items():
        if getattr(case, axis) not in choices:
            raise ValueError(f"{axis}: expected one of {', '.join(choices)}, but got {text}")
    return case
