"""Figure 9 on the demo model: drafts on full and compressed caches, over prompt lengths."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import TextStreamer

from snapkv import CompressedCache, FullCache, SnapKV
from snapkv.app import draft_methods
from snapkv.app.answering import continue_ids
from snapkv.app.draft_methods import DraftMethod
from snapkv.app.models import LoadedModel, load
from snapkv.app.prompts import question_prompt
from snapkv.app.settings import GenerationSettings
from snapkv.decoding.speculation import begin_verifying, fast_few_rows
from snapkv.policies import Policy
from snapkv_lab.evaluate.haystack import load_haystack
from snapkv_lab.experiments.experiment import Experiment, Given, Shown, of, pivot
from snapkv_lab.experiments.records import Row, environment_line
from snapkv_lab.measure.timing import alternate, ratios, spread

QUESTION = "Summarize the text above."
BASELINES = ("plain, full cache", "Medusa, full cache")
SELF_SPECULATION = "self-speculation, SnapKV drafts"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured.

    Attributes:
        lengths: of prompts, by dtype.
    """

    lengths: dict[str, tuple[int, ...]] = field(
        default_factory=lambda: {"float32": (1024, 4096), "bfloat16": (1024, 4096, 7936)}
    )
    budget: int = 512
    tokens: int = 48
    rounds: int = 3
    pass_tokens: tuple[int, ...] = (1, 2, 4, 7, 10)
    pass_prompt_tokens: int = 4096
    pass_rounds: int = 15


SMALL = Sizes(
    lengths={"float32": (256,)},
    budget=64,
    tokens=12,
    rounds=2,
    pass_prompt_tokens=128,
    pass_rounds=3,
)


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """One text, and what it took behind its first token."""

    tokens: tuple[int, ...]
    ms_per_token: float
    acceptance_length: float
    held_bytes: int


class Clock(TextStreamer):
    """Notes when the first and the last tokens came."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: Tensor) -> None:
        """Tokens have come."""
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        """No more will come."""

    def ms_per_token(self) -> float:
        """Of the tokens behind the first step; the prompt itself is put first."""
        return 1000 * (self.times[-1] - self.times[1]) / sum(self.counts[2:])


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A cache and a way to decode on it.

    Attributes:
        like: the contender whose text it must give, token for token.
    """

    name: str
    policy: Policy
    like: str
    drafts: DraftMethod | None = field(default=None)


def contenders(loaded: LoadedModel, budget: int, heads: str) -> list[Contender]:
    """Figure 9's three, what SnapKV alone does, and self-speculation."""
    full, kept = FullCache(), SnapKV(budget, window_size=16, kernel_size=13)
    medusa = draft_methods.medusa(loaded, heads)
    plain, compressed = "plain, full cache", "plain, SnapKV"
    return [
        Contender(name=plain, policy=full, like=plain),
        Contender(name="Medusa, full cache", policy=full, like=plain, drafts=medusa),
        Contender(name=compressed, policy=kept, like=compressed),
        Contender(name="Medusa, SnapKV", policy=kept, like=compressed, drafts=medusa),
        Contender(
            name=SELF_SPECULATION,
            policy=kept,
            like=plain,
            drafts=draft_methods.self_speculation(),
        ),
    ]


def measure(sizes: Sizes, heads: str, dtype: str) -> Iterator[Row]:
    """A row per contender and length, and one per cache and size of a pass."""
    loaded = load("demo", dtype=dtype)
    common = {"dtype": dtype, "model": loaded.description()}
    texts = _texts(loaded, sizes, heads, sizes.lengths[dtype])
    for row in itertools.chain(_passes(loaded, sizes), texts):
        yield {**row, **common}


def _texts(loaded: LoadedModel, sizes: Sizes, heads: str, lengths: Sequence[int]) -> Iterator[Row]:
    everyone = contenders(loaded, sizes.budget, heads)
    exact = loaded.model.dtype == torch.float32
    if not exact:  # drafts of another rounding cannot give the full cache's text token for token
        everyone = [one for one in everyone if one.name != SELF_SPECULATION]
    for length in lengths:
        ids = _prompt(loaded, length)
        runs = alternate(
            {one.name: _run(loaded, one, ids, sizes) for one in everyone},
            rounds=sizes.rounds,
            warmup_rounds=0 if sizes.rounds > 2 else 1,
        )
        if exact:
            _require_same_texts(everyone, runs)
        yield from _rows(everyone, runs, ids.shape[1], sizes)


@torch.inference_mode()
def _passes(loaded: LoadedModel, sizes: Sizes) -> Iterator[Row]:
    """What a forward pass of several tokens takes, beside one of one token."""
    ids = _prompt(loaded, sizes.pass_prompt_tokens)
    full, kept = FullCache(), SnapKV(sizes.budget, window_size=16, kernel_size=13)
    for name, policy in (("full cache", full), ("SnapKV", kept)):
        cache = CompressedCache(loaded.model, policy)
        loaded.model(ids, past_key_values=cache, logits_to_keep=1)
        begin_verifying(cache)
        with fast_few_rows(loaded.model):
            times = alternate(
                {count: _pass(loaded.model, cache, count) for count in sizes.pass_tokens},
                rounds=sizes.pass_rounds,
                warmup_rounds=2,
            )
        one = times[1]
        for count, samples in times.items():
            yield {
                "benchmark": "pass",
                "cache": name,
                "prompt_tokens": ids.shape[1],
                "budget": sizes.budget,
                "tokens": count,
                "ms": spread([1000 * seconds for seconds in samples], 2),
                "against_one": spread(ratios(samples, one), 3),
            }


def _pass(model: Any, cache: CompressedCache, count: int) -> Callable[[], float]:
    tokens = torch.arange(100, 100 + count)[None]

    def run() -> float:
        begin = time.perf_counter()
        model(tokens, past_key_values=cache, use_cache=True)
        seconds = time.perf_counter() - begin
        cache.crop(-count)
        return seconds

    return run


def _prompt(loaded: LoadedModel, length: int) -> Tensor:
    """(1, length) int64: essays and a question behind them."""
    tokenizer = loaded.tokenizer
    frame = question_prompt(tokenizer, "", QUESTION).token_ids(tokenizer).shape[1]
    words = tokenizer(load_haystack().text, add_special_tokens=False, verbose=False)["input_ids"]
    text = tokenizer.decode(words[: length - frame])
    ids: Tensor = question_prompt(tokenizer, text, QUESTION).token_ids(tokenizer)
    return ids


def _run(loaded: LoadedModel, one: Contender, ids: Tensor, sizes: Sizes) -> Callable[[], Decoded]:
    settings = GenerationSettings(max_new_tokens=sizes.tokens, min_new_tokens=sizes.tokens)

    def run() -> Decoded:
        cache, clock = CompressedCache(loaded.model, one.policy), Clock()
        text = continue_ids(loaded, ids, cache, settings, streamer=clock, drafts=one.drafts)
        tally: dict[str, Any] = {} if one.drafts is None else one.drafts.tally(sizes.tokens, 1)
        return Decoded(
            tokens=tuple(text[0, ids.shape[1] :].tolist()),
            ms_per_token=clock.ms_per_token(),
            acceptance_length=tally.get("acceptance_length", 1.0),
            held_bytes=cache.report().held_bytes + tally.get("full_cache_bytes", 0),
        )

    return run


def _require_same_texts(everyone: Sequence[Contender], runs: dict[str, list[Decoded]]) -> None:
    """No time counts of a decoding that gives another text."""
    for one in everyone:
        if {run.tokens for run in runs[one.name]} != {runs[one.like][0].tokens}:
            raise AssertionError(f"expected {one.name} to give the text of {one.like}")


def _rows(
    everyone: Sequence[Contender], runs: dict[str, list[Decoded]], length: int, sizes: Sizes
) -> Iterator[Row]:
    times = {name: [run.ms_per_token for run in of_name] for name, of_name in runs.items()}
    for one in everyone:
        found, like = runs[one.name][0], runs[one.like][0]
        same = sum(mine == theirs for mine, theirs in zip(found.tokens, like.tokens, strict=True))
        yield {
            "benchmark": "medusa",
            "contender": one.name,
            "prompt_tokens": length,
            "budget": sizes.budget,
            "tokens": sizes.tokens,
            "ms_per_token": spread(times[one.name], 2),
            "samples_ms": [round(ms, 2) for ms in times[one.name]],
            "faster_than": {
                base: spread(ratios(times[base], times[one.name]), 3)
                for base in BASELINES
                if base != one.name
            },
            "acceptance_length": round(found.acceptance_length, 3),
            "held_bytes": found.held_bytes,
            "same_tokens": same,
        }


def _tables(rows: list[Row]) -> Iterator[str]:
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        own = of(rows, benchmark="medusa", dtype=dtype)
        for what, pattern in {
            "milliseconds per token": "{ms_per_token[p50]:.1f}",
            **{f"times faster than {base}": partial(_faster, base) for base in BASELINES},
            "tokens per verifying pass": "{acceptance_length:.2f}",
            f"tokens of {own[0]['tokens']} as expected": "{same_tokens}",
        }.items():
            yield f"## {dtype}, {what}"
            yield pivot(own, "decoding", "{contender}", "{prompt_tokens:,}", pattern)
    yield "## What a pass takes"
    yield pivot(
        of(rows, benchmark="pass"),
        "dtype, cache",
        "{dtype}, {cache}",
        "{tokens} tokens",
        "{ms[p50]:.0f} ms ({against_one[p50]:.2f})",
    )


def _faster(base: str, row: Row) -> str:
    found = row["faster_than"].get(base)
    return "" if found is None else f"{found['p50']:.2f}"


def _line(rows: list[Row]) -> str:
    dtypes = dict.fromkeys(row["dtype"] for row in rows)
    return "; ".join(
        environment_line(of(rows, benchmark="medusa", dtype=dtype)) for dtype in dtypes
    )


def _measured(given: Given) -> Iterator[Row]:
    sizes = SMALL if given.small else Sizes()
    dtypes = given.parts[:1] if given.small else given.parts
    for dtype in dtypes:
        yield from measure(sizes, given.options["heads"], dtype)


EXPERIMENT = Experiment(
    name="medusa",
    title="Drafts on compressed caches",
    measure=_measured,
    small=True,
    parts=tuple(Sizes().lengths),
    part_key="dtype",
    options={"heads": "demo"},
    measured=_line,
    tables=_tables,
    shown={
        "drafts": Shown(
            "float32, times faster than plain, full cache",
            ("decoding", "1,025", "4,097"),
            ("plain, SnapKV", "Medusa, SnapKV", "self-speculation, SnapKV drafts"),
        ),
        "drafts-16-bit": Shown(
            "bfloat16, times faster than plain, full cache",
            ("decoding", "1,025", "4,097", "7,937"),
            ("plain, SnapKV", "Medusa, full cache", "Medusa, SnapKV"),
        ),
    },
)


if __name__ == "__main__":
    EXPERIMENT.main()
