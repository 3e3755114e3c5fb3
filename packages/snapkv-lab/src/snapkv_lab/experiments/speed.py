"""The time and the memory of reading a prompt and of decoding after it.

`speed` measures decoding after a short and a long prompt, and the peak memory of reading, which the
planner is compared with. `by_default` compares `ask` without options with the full cache, which it
must not exceed.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from snapkv import CompressedCache, FullCache, SnapKV, default_policy
from snapkv.hf.cache_argument import passed
from snapkv.policies import Policy
from snapkv.validation import AUTO
from snapkv_lab.experiments.experiment import Experiment, RunContext, Size
from snapkv_lab.experiments.measuring import InterleavedTimings, run_in_own_process
from snapkv_lab.experiments.pages import Listing
from snapkv_lab.experiments.prompts import SEED, greedy_decoder, read_prompt
from snapkv_lab.measure.contenders import Contender, compressed_contender, transformers_contender
from snapkv_lab.measure.held_bytes import cache_bytes, peak_growth_bytes, resident_bytes
from snapkv_lab.rows import Row

_WARMUP_TOKENS = 64


def contenders(budget: int) -> dict[str, Contender]:
    """Return the three caches that are compared, by label: "transformers" is the cache of
    transformers, "full" is snapkv's cache with all tokens, and "snapkv" keeps `budget` tokens per
    head.
    """
    caches = (
        transformers_contender("transformers"),
        compressed_contender("full", FullCache()),
        compressed_contender("snapkv", SnapKV(budget)),
    )
    return {each.label: each for each in caches}


@torch.inference_mode()
def _decoding(context: RunContext) -> Iterator[Row]:
    """Yield a row with the time per token for each cache and each of two prompt lengths, followed
    by a row for each cache with the ratio of the long prompt to the short one.
    """
    steps, rows = {}, {}
    for tokens in context.decode_behind:
        prompt = read_prompt(context.loaded.model, context.prompt(tokens))
        for policy in (SnapKV(context.budget), FullCache()):
            cache = prompt.compressed(policy)
            report = cache.report()
            steps[policy.name, tokens] = greedy_decoder(prompt, cache)
            rows[policy.name, tokens] = (
                {
                    "benchmark": "decode",
                    "cache": policy.name,
                    "prompt_tokens": tokens,
                    "budget": None if policy.name == "full" else context.budget,
                },
                {"held_bytes": report.held_bytes, "full_bytes": report.full_bytes},
            )
    turns = InterleavedTimings(steps, rounds=context.new_tokens, warmup_rounds=4)
    for name, (about, sizes) in rows.items():
        yield about | {"ms_per_token": turns.ms(name, 2), "tokens": context.new_tokens} | sizes
    short, long = context.decode_behind
    for policy in ("snapkv", "full"):
        yield rows[policy, long][0] | {
            "against_tokens": short,
            "pairs": context.new_tokens,
            "ratio": turns.ratio((policy, long), (policy, short)),
        }


def _peaks(context: RunContext) -> Iterator[Row]:
    """Yield a row with the peak memory of reading for each cache, measured in its own process."""
    for name in contenders(context.budget):
        yield run_in_own_process(
            peak_of_reading, context.model, name, context.peak_length, context.budget
        )


@torch.inference_mode()
def peak_of_reading(name: str, cache_name: str, tokens: int, budget: int) -> Row:
    """Read a prompt in this process, and return a row with the bytes that it grows by at the peak.

    Args:
        name: the model, as `snapkv ask --model` takes it.
        cache_name: a key of `contenders`.
        tokens: the length of the prompt.
        budget: the tokens that SnapKV keeps.
    """
    context = RunContext(model=name)
    model, ids = context.loaded.model, torch.tensor([context.prompt(tokens)])
    cache = contenders(budget)[cache_name].make(model, tokens)
    model(ids[:, :_WARMUP_TOKENS], use_cache=False, logits_to_keep=1)
    before = resident_bytes("VmRSS")
    peak = peak_growth_bytes(lambda: model(ids, **passed(cache), logits_to_keep=1), model.device)
    return {
        "benchmark": "peak memory",
        "cache": cache_name,
        "prompt_tokens": tokens,
        "budget": budget,
        "peak_growth_bytes": peak,
        "growth_bytes": resident_bytes("VmRSS") - before,
        "held_bytes": cache_bytes(cache),
        "kept_bytes": sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers),
    }


_NAMES = {
    "transformers": "transformers",
    "full": "snapkv, every token kept",
    "snapkv": "snapkv, compressed",
}


def _against_short(rows: list[Row]) -> Iterable[Row]:
    ratio = {(r["cache"], r["prompt_tokens"]): r["ratio"] for r in rows if "ratio" in r}
    for row in sorted(rows, key=lambda row: (row["cache"], row["prompt_tokens"])):
        if "ms_per_token" in row:
            yield row | {"against": ratio.get((row["cache"], row["prompt_tokens"]))}


SPEED = Experiment(
    name="speed",
    title="Speed and memory",
    measure=lambda context: itertools.chain(_decoding(context), _peaks(context)),
    options={
        "peak_length": Size(4096, 160),
        "decode_behind": Size((1024, 6144), (96, 160)),
        "budget": Size(512, 64),
        "new_tokens": Size(64, 2),
    },
    fields={"seed": SEED},
    tables=[
        Listing(
            {
                "cache": lambda row: _NAMES[row["cache"]],
                "prompt tokens": "{prompt_tokens:,}",
                "ms per token": "{ms_per_token[p50]:.1f}",
                "against the short prompt": "{against:spread|.3f}",
                "bytes held": "{held_bytes:bytes}",
            },
            "Decoding after a prompt",
            {"benchmark": "decode"},
            _against_short,
        ),
        Listing(
            {
                "cache": lambda row: _NAMES[row["cache"]],
                "peak": "{peak_growth_bytes:bytes}",
                "held after it": "{held_bytes:bytes}",
            },
            "Memory, {prompt_tokens:,} tokens",
            {"benchmark": "peak memory"},
        ),
    ],
)


@torch.inference_mode()
def _by_default(context: RunContext) -> Iterator[Row]:
    """Yield a row for each length that compares the default settings with the full cache.

    The times of the first token have names that begin with "first", and those of a later token with
    "token".
    """
    policies = {"default": default_policy(AUTO), "full": FullCache()}
    for tokens in context.lengths:
        prompt = read_prompt(context.loaded.model, context.prompt(tokens))
        ids = torch.tensor([context.prompt(tokens)], device=prompt.model.device)

        def read(policy: Policy, ids: Tensor = ids) -> None:
            cache = CompressedCache(context.loaded.model, policy)
            context.loaded.model(ids, **passed(cache), logits_to_keep=1)

        caches = {name: prompt.compressed(policy) for name, policy in policies.items()}
        report = caches["default"].report()
        reads = {name: functools.partial(read, policy) for name, policy in policies.items()}
        steps = {name: greedy_decoder(prompt, cache) for name, cache in caches.items()}
        row: Row = {"benchmark": "default", "prompt_tokens": tokens}
        row |= {"kept_tokens": report.kept_tokens, "held_bytes": report.held_bytes}
        row["full_bytes"] = report.full_bytes
        for what, work, rounds in (
            ("first", reads, context.readings),
            ("token", steps, context.new_tokens),
        ):
            turns = InterleavedTimings(work, rounds=rounds, warmup_rounds=1)
            row |= {
                f"{what}_ms": turns.ms("default", 2),
                f"{what}_ratio": turns.ratio("default", "full"),
                f"{what}_cpu_ratio": turns.ratio("default", "full", clock="cpu_ms"),
            }
        yield row


BY_DEFAULT = Experiment(
    name="by_default",
    title="Without an option, against the full cache",
    duration="ten minutes",
    measure=_by_default,
    threads=1,
    options={
        "lengths": Size((1024, 2048, 6144), (96, 160)),
        "readings": Size(9, 2),
        "new_tokens": Size(32, 2),
    },
    fields={"seed": SEED},
    tables=[
        Listing(
            {
                "prompt tokens": "{prompt_tokens:,}",
                "kept": "{kept_tokens:,.0f}",
                "bytes held": "{held_bytes:bytes}",
                "of the full cache": "{full_bytes:bytes}",
                "first token, against full": "{first_ratio:spread|.2f}",
                "of processor time": "{first_cpu_ratio:spread|.2f}",
                "per token, against full": "{token_ratio:spread|.2f}",
                "per token, of processor time": "{token_cpu_ratio:spread|.2f}",
            }
        )
    ],
)
