"""Figure 9 on the demo model: drafts on full and compressed caches, for several prompt lengths."""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor
from transformers import TextStreamer

from snapkv import CompressedCache, FullCache, SnapKV
from snapkv.policies import Policy
from snapkv_app.answering import continue_ids
from snapkv_app.draft_methods import DraftMethod
from snapkv_app.models import LoadedModel, load
from snapkv_app.prompts import question_prompt
from snapkv_app.settings import GenerationSettings
from snapkv_lab.evaluate.haystack import load_haystack, token_ids
from snapkv_lab.experiments.experiment import Experiment, RunContext, Size
from snapkv_lab.experiments.pages import Listing
from snapkv_lab.measure.timing import pair_ratios, percentiles, run_alternating
from snapkv_lab.medusa import Medusa, load_heads
from snapkv_lab.report.tables import Pivot
from snapkv_lab.rows import Row, group_rows

QUESTION = "Summarize the text above."
PLAIN, MEDUSA = "plain, full cache", "Medusa, full cache"


class Decoded(NamedTuple):
    """The token ids of a generated text, the time per token, and the bytes of the cache."""

    tokens: tuple[int, ...]
    ms_per_token: float
    acceptance_length: float = 1.0
    held_bytes: int = 0


class Clock(TextStreamer):
    """A streamer that records the time at which each token is generated."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        """Do nothing when the text ends."""

    def ms_per_token(self) -> float:
        """Return the time per token in milliseconds, without prompt and first token.

        The prompt and at least two steps must have been put.
        """
        return 1000 * (self.times[-1] - self.times[1]) / sum(self.counts[2:])


class DraftContender(NamedTuple):
    """A combination of a cache and a way to generate text with it.

    The text must equal that of the contender `like`.
    """

    name: str
    policy: Policy
    like: str
    medusa: Medusa | None = None


def contenders(loaded: LoadedModel, budget: int, heads: str) -> list[DraftContender]:
    """Return the contenders of the paper's Figure 9, and plain decoding with SnapKV.

    Args:
        loaded: the model.
        budget: the tokens that SnapKV keeps.
        heads: the heads, as `load_heads` takes them.
    """
    full, kept = FullCache(), SnapKV(budget, window_size=16, kernel_size=13)
    compressed, medusa = "plain, SnapKV", Medusa(load_heads(heads, loaded.model))
    return [
        DraftContender(PLAIN, full, PLAIN),
        DraftContender(MEDUSA, full, PLAIN, medusa),
        DraftContender(compressed, kept, compressed),
        DraftContender("Medusa, SnapKV", kept, compressed, medusa),
    ]


def _measure(dtype: str, context: RunContext) -> Iterator[Row]:
    """Yield a row for each contender and each length of the run, with the model in `dtype`."""
    same = str(context.loaded.model.dtype) == f"torch.{dtype}"
    loaded = context.loaded if same else load(context.model, dtype=dtype)
    everyone = contenders(loaded, context.budget, context.heads)
    for length in context.lengths[dtype]:
        ids = _prompt(loaded, length)
        runs = run_alternating(
            {one.name: partial(_decoded, loaded, one, ids, context.tokens) for one in everyone},
            rounds=context.rounds,
            warmup_rounds=0 if context.rounds > 2 else 1,
        )
        if dtype == "float32":
            require_same_texts(everyone, runs)
        for one in everyone:
            yield _row(one, runs, ids.shape[1], context) | {"model": loaded.description()}


def _prompt(loaded: LoadedModel, length: int) -> Tensor:
    """Return the token ids, (1, T) int64, of a prompt with essays and a question about them, where
    T is about `length`.
    """
    tokenizer = loaded.tokenizer
    frame = question_prompt(tokenizer, "", QUESTION).token_ids(tokenizer).shape[1]
    text = tokenizer.decode(token_ids(tokenizer, load_haystack().text)[: length - frame])
    ids: Tensor = question_prompt(tokenizer, text, QUESTION).token_ids(tokenizer)
    return ids


def _decoded(loaded: LoadedModel, one: DraftContender, ids: Tensor, tokens: int) -> Decoded:
    """Generate exactly `tokens` tokens after a prompt with a new cache, and return the text and its
    costs.

    Args:
        loaded: the model and its tokenizer.
        one: the policy of the cache, and the heads that draft, if any.
        ids: (1, T) int64, the prompt.
        tokens: how many tokens to generate, at least 2.
    """
    settings = GenerationSettings(max_new_tokens=tokens, min_new_tokens=tokens)
    cache, clock = CompressedCache(loaded.model, one.policy), Clock()
    drafts = one.medusa and DraftMethod(name="medusa", options={"custom_generate": one.medusa})
    text = continue_ids(loaded, ids, cache, settings, streamer=clock, drafts=drafts)
    tokens_after = tuple(text[0, ids.shape[1] :].tolist())
    length = 1.0 if one.medusa is None else one.medusa.tally.acceptance_length
    return Decoded(tokens_after, clock.ms_per_token(), length, cache.report().held_bytes)


def require_same_texts(everyone: Sequence[DraftContender], runs: dict[str, list[Decoded]]) -> None:
    """Check that all contenders generated the same text in all rounds as without drafts.

    Args:
        everyone: the contenders.
        runs: what each contender generated in each round, by its name.

    Raises:
        AssertionError: a contender gave another text than the contender `like`.
    """
    for one in everyone:
        if {run.tokens for run in runs[one.name]} != {runs[one.like][0].tokens}:
            raise AssertionError(f"expected {one.name} to give the text of {one.like}")


def _row(
    one: DraftContender, runs: dict[str, list[Decoded]], length: int, context: RunContext
) -> Row:
    """Return the row of a contender.

    Args:
        one: the contender.
        runs: what each contender generated in each round, by its name.
        length: the number of prompt tokens.
        context: the run.
    """
    times = {name: [run.ms_per_token for run in of_name] for name, of_name in runs.items()}
    own, first, like = times[one.name], runs[one.name][0], runs[one.like][0]
    return {
        "benchmark": "medusa",
        "contender": one.name,
        "prompt_tokens": length,
        "budget": context.budget,
        "tokens": context.tokens,
        "ms_per_token": percentiles(own, 2),
        "samples_ms": [round(ms, 2) for ms in own],
        "faster_than": {
            base: percentiles(pair_ratios(times[base], own), 3)
            for base in (PLAIN, MEDUSA)
            if base != one.name
        },
        "acceptance_length": round(first.acceptance_length, 3),
        "held_bytes": first.held_bytes,
        "same_tokens": sum(map(int.__eq__, first.tokens, like.tokens)),
    }


def _tables(rows: list[Row]) -> Iterator[str]:
    for dtype, decoded in group_rows(rows, "dtype").items():
        for what, pattern in {
            "milliseconds per token": "{ms_per_token[p50]:.1f}",
            **{f"times faster than {base}": partial(_faster, base) for base in (PLAIN, MEDUSA)},
            "tokens per verifying pass": "{acceptance_length:.2f}",
            f"tokens of {decoded[0]['tokens']} as expected": "{same_tokens}",
        }.items():
            by = Pivot("decoding", "{contender}", "{prompt_tokens:,}", pattern)
            yield from Listing(by, f"{dtype}, {what}").parts(decoded)


def _faster(base: str, row: Row) -> str:
    ratio = row["faster_than"].get(base)
    return "" if ratio is None else f"{ratio['p50']:.2f}"


DRAFTS = Experiment(
    name="medusa",
    title="Drafts on compressed caches",
    measure={dtype: partial(_measure, dtype) for dtype in ("float32", "bfloat16")},
    part_key="dtype",
    options={
        "heads": "demo",
        "budget": Size(512, 48),
        "tokens": Size(48, 6),
        "rounds": Size(3, 2),
        "lengths": Size(
            {"float32": (1024, 4096), "bfloat16": (1024, 4096, 7936)},
            {"float32": (96,), "bfloat16": (96,)},
        ),
    },
    tables=_tables,
)
