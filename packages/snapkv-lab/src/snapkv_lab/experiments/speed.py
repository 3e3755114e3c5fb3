"""What reading a prompt and decoding after it take, in time and memory.

`speed`: decoding after a short and a long prompt, and the peak of reading, which the planner is
judged by. `flat`: what is promised of a machine with two cores, to be run with nothing
else on it. `appending`: as many stored tokens, appended in place or copied for every token,
as transformers' own cache does, which concatenates what is stored and what is new. `codes`: steps
that read few bits against steps that read as many tokens, or as many bytes, of 16 bits.
`by_default`: what `ask` does without an option, against the full cache, which it may not exceed.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from snapkv import CompressedCache, FullCache, KVCodes, SnapKV, default_policy, ops
from snapkv.app.models import load
from snapkv.policies import Policy, PromptLayer
from snapkv.validation import AUTO
from snapkv_lab.experiments.experiment import Experiment, RunContext, Size
from snapkv_lab.experiments.measuring import Turns, in_own_process
from snapkv_lab.experiments.pages import Listing
from snapkv_lab.experiments.prompts import SEED, decoder, read_prompt
from snapkv_lab.measure.contenders import Contender, compressed, filled, full
from snapkv_lab.measure.decode import DecodeBench
from snapkv_lab.measure.held_bytes import cache_bytes, peak_growth_bytes, resident_bytes
from snapkv_lab.measure.timing import Spent, spent_on
from snapkv_lab.rows import Row

_WARMUP_TOKENS = 64


def contenders(budget: int) -> dict[str, Contender]:
    """transformers' own cache and attention; every token kept through snapkv; compressed."""
    found = (
        full("transformers"),
        compressed("full", FullCache()),
        compressed("snapkv", SnapKV(budget)),
    )
    return {each.label: each for each in found}


@torch.inference_mode()
def _decoding(given: RunContext) -> Iterator[Row]:
    """Times per token, then ratios of a long prompt to a short one; all caches in turn."""
    steps, rows = {}, {}
    for tokens in given.decode_behind:
        prompt = read_prompt(given.loaded.model, given.prompt(tokens))
        for policy in (SnapKV(given.budget), FullCache()):
            cache = prompt.compressed(policy)
            report = cache.report()
            steps[policy.name, tokens] = decoder(prompt, cache)
            rows[policy.name, tokens] = (
                {
                    "benchmark": "decode",
                    "cache": policy.name,
                    "prompt_tokens": tokens,
                    "budget": None if policy.name == "full" else given.budget,
                },
                {"held_bytes": report.held_bytes, "full_bytes": report.full_bytes},
            )
    turns = Turns(steps, rounds=given.new_tokens, warmup_rounds=4)
    for name, (about, sizes) in rows.items():
        yield about | {"ms_per_token": turns.ms(name, 2), "tokens": given.new_tokens} | sizes
    short, long = given.decode_behind
    for policy in ("snapkv", "full"):
        yield rows[policy, long][0] | {
            "against_tokens": short,
            "pairs": given.new_tokens,
            "ratio": turns.ratio((policy, long), (policy, short)),
        }


def _peaks(given: RunContext, tokens: int) -> Iterator[Row]:
    """A row per cache, each measured in a process of its own."""
    for name in contenders(given.budget):
        yield in_own_process(peak_of_reading, given.model, name, tokens, given.budget)


@torch.inference_mode()
def peak_of_reading(name: str, cache_name: str, tokens: int, budget: int) -> Row:
    """Bytes the process grows by, at its peak, while it reads the prompt."""
    given = RunContext(model=name)
    model, ids = given.loaded.model, torch.tensor([given.prompt(tokens)])
    cache = contenders(budget)[cache_name].make(model, tokens)
    model(ids[:, :_WARMUP_TOKENS], use_cache=False, logits_to_keep=1)
    before = resident_bytes("VmRSS")
    peak = peak_growth_bytes(
        lambda: model(ids, past_key_values=cache, logits_to_keep=1), model.device
    )
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


@torch.no_grad()
def overhead(model: Any, ids: Tensor, policy: Policy, rounds: int) -> Row:
    """Compressing all layers of a prompt, (1, T), against its prefill with transformers' cache."""
    layers = read_prompt(model, ids[0].tolist(), recorded_queries=policy.query_tokens).layers
    work = {
        "reading": lambda: model(
            ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=1
        ),
        "compressing": lambda: _compress(layers, policy),
    }
    turns = Turns(work, rounds=rounds)
    return {
        "benchmark": "overhead",
        "policy": policy.describe(),
        "prompt_tokens": ids.shape[1],
        "layers": len(layers),
        "rounds": rounds,
        "reading_ms": turns.ms("reading", 2),
        "compressing_ms": turns.ms("compressing", 3),
        "share": turns.ratio("compressing", "reading", 5),
    }


def _compress(layers: Sequence[PromptLayer], policy: Policy) -> None:
    """What every layer of a compressed cache does where the prompt ends."""
    shown = list(map(replace, layers))  # a layer knows the votes that were counted once
    for layer, selection in zip(shown, policy.select_all(shown), strict=True):
        if selection is not None:
            for states in (layer.keys, layer.values):
                ops.gather_tokens(states, selection.keep_indices)


_NAMES = {"full": "snapkv, every token kept", "snapkv": "snapkv, compressed"}


def _against_short(rows: list[Row]) -> Iterable[Row]:
    ratio = {(r["cache"], r["prompt_tokens"]): r["ratio"] for r in rows if "ratio" in r}
    for row in sorted(rows, key=lambda row: (row["cache"], row["prompt_tokens"])):
        if "ms_per_token" in row:
            yield row | {"against": ratio.get((row["cache"], row["prompt_tokens"]))}


SPEED = Experiment(
    name="speed",
    title="Speed and memory",
    measure=lambda given: itertools.chain(_decoding(given), _peaks(given, given.peak_length)),
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
    ],
)


@torch.inference_mode()
def _flat_decoding(given: RunContext) -> Iterator[Row]:
    """Time per token after real prompts, one token each in turn; ratios to the shortest."""
    steps = {}
    for length in given.lengths:
        prompt = read_prompt(given.loaded.model, given.prompt(length))
        steps[length] = decoder(prompt, prompt.compressed(SnapKV(given.budget)))
        prompt.layers.clear()  # the full cache
    turns = Turns(steps, rounds=given.flat_tokens, warmup_rounds=4)
    for length in turns:
        yield {
            "benchmark": "flat",
            "prompt_tokens": length,
            "budget": given.budget,
            "tokens": given.flat_tokens,
            "ms_per_token": turns.ms(length, 2),
            "ratio": turns.ratio(length, given.lengths[0]),
        }


def _flat(given: RunContext) -> Iterator[Row]:
    policy = SnapKV(given.budget)
    yield from _flat_decoding(given)
    bench = DecodeBench(  # on random keys and values
        model=given.loaded.model,
        contenders=[
            compressed("snapkv", policy),
            full("transformers"),
            full("transformers-static"),
        ],
        lengths=[given.batch_length],
        batches=[given.batch],
        tokens=given.batch_tokens,
        rounds=given.batch_rounds,
    )
    for row in bench.rows():
        yield {"benchmark": "batch", "budget": given.budget, **row}
    for length in given.overhead_lengths:
        ids = torch.tensor([given.prompt(length)])
        yield overhead(given.loaded.model, ids, policy, given.overhead_rounds)
    yield from _peaks(given, given.peak_length)


FLAT = Experiment(
    name="flat",
    title="Flat after the prompt",
    takes="an hour or less, with nothing else on the machine",
    measure=_flat,
    threads=2,
    options={
        "budget": Size(512, 64),
        "lengths": Size((1024, 2048, 4096, 8192), (128, 160)),
        "flat_tokens": Size(64, 2),
        "batch": Size(4, 2),
        "batch_length": Size(8192, 160),
        "batch_tokens": Size(8, 1),
        "batch_rounds": Size(7, 2),
        "overhead_lengths": Size((4096, 8192), (160,)),
        "overhead_rounds": Size(5, 2),
        "peak_length": Size(8192, 160),
    },
    fields={"seed": SEED},
    tables=[
        Listing(
            {
                "prompt tokens": "{prompt_tokens:,}",
                "ms per token": "{ms_per_token[p50]:.1f}",
                "against the shortest": "{ratio:spread|.3f}",
            },
            "Time per token by length of the prompt, budget {budget}",
            {"benchmark": "flat"},
        ),
        Listing(
            {
                "cache": "{cache}",
                "ms per token": "{ms_per_token[p50]:.1f}",
                "against snapkv": "{ratio:spread|.3f}",
                "bytes held": "{held_bytes:bytes}",
            },
            "Against the full cache, {batch} requests of {length:,} tokens",
            {"benchmark": "batch"},
        ),
        Listing(
            {
                "prompt tokens": "{prompt_tokens:,}",
                "reading, s": "{reading_ms[p50]:seconds|.2f}",
                "compressing, ms": "{compressing_ms[p50]:.0f}",
                "share": "{share[p50]:.2%}",
            },
            "Vote, selection and gather",
            {"benchmark": "overhead"},
        ),
        Listing(
            {
                "cache": "{cache}",
                "peak": "{peak_growth_bytes:bytes}",
                "held after it": "{held_bytes:bytes}",
            },
            "Memory",
            {"benchmark": "peak memory"},
        ),
    ],
)


@torch.inference_mode()
def appended(
    model: Any, *, cells: Sequence[tuple[int, int]], prompt_tokens: int, tokens: int
) -> Iterator[Row]:
    """A row per batch and number of stored tokens; caches are filled directly.

    transformers' cache has read a prompt of only what it stores.
    """
    for batch, stored in cells:
        work = {
            "snapkv": _step(model, compressed("snapkv", SnapKV(stored)), batch, prompt_tokens),
            "transformers": _step(model, full("transformers"), batch, stored),
        }
        turns = Turns(work, rounds=tokens, warmup_rounds=4)
        yield {
            "benchmark": "appending",
            "batch": batch,
            "stored_tokens": stored,
            "prompt_tokens": prompt_tokens,
            "tokens": tokens,
            "ms": turns.ms("snapkv", 2),
            "copying_ms": turns.ms("transformers", 2),
            "ratio": turns.ratio("snapkv", "transformers"),
        }


def _step(model: Any, contender: Contender, batch: int, seen: int) -> Callable[[], Spent]:
    cache = filled(contender, model, batch=batch, tokens=seen)
    token = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)

    def step() -> Spent:
        with contender.at_work(model):
            return spent_on(lambda: model(token, past_key_values=cache))

    return step


APPENDING = Experiment(
    name="appending",
    title="Appending in place",
    takes="two minutes",
    measure=lambda given: appended(
        given.loaded.model,
        cells=given.cells,
        prompt_tokens=given.prompt_tokens,
        tokens=given.new_tokens,
    ),
    options={
        "cells": Size(
            ((1, 512), (1, 1024), (1, 2048), (4, 512), (4, 1024), (4, 2048), (8, 1024)),
            ((1, 40), (2, 80)),
        ),
        "prompt_tokens": Size(4096, 120),
        "new_tokens": Size(96, 3),
    },
    tables=[
        Listing(
            {
                "batch": "{batch}",
                "stored tokens": "{stored_tokens:,}",
                "in place, ms": "{ms[p50]:.1f}",
                "copying, ms": "{copying_ms[p50]:.1f}",
                "ratio": "{ratio[p50]:.3f}",
            }
        )
    ],
)


@torch.inference_mode()
def _by_default(given: RunContext) -> Iterator[Row]:
    """What `ask` keeps without an option, against the full cache: prefill, then tokens, in turn."""
    policies = {"default": default_policy(AUTO), "full": FullCache()}
    for tokens in given.lengths:
        prompt = read_prompt(given.loaded.model, given.prompt(tokens))
        ids = torch.tensor([given.prompt(tokens)], device=prompt.model.device)

        def read(policy: Policy, ids: Tensor = ids) -> None:
            cache = CompressedCache(given.loaded.model, policy)
            given.loaded.model(ids, past_key_values=cache, logits_to_keep=1)

        caches = {name: prompt.compressed(policy) for name, policy in policies.items()}
        report = caches["default"].report()
        reads = {name: functools.partial(read, policy) for name, policy in policies.items()}
        steps = {name: decoder(prompt, cache) for name, cache in caches.items()}
        row: Row = {"benchmark": "default", "prompt_tokens": tokens}
        row |= {"kept_tokens": report.kept_tokens, "held_bytes": report.held_bytes}
        row["full_bytes"] = report.full_bytes
        for what, work, rounds in (
            ("first", reads, given.readings),
            ("token", steps, given.new_tokens),
        ):
            turns = Turns(work, rounds=rounds, warmup_rounds=1)
            row |= {
                f"{what}_ms": turns.ms("default", 2),
                f"{what}_ratio": turns.ratio("default", "full"),
                f"{what}_cpu_ratio": turns.ratio("default", "full", clock="cpu_ms"),
            }
        yield row


BY_DEFAULT = Experiment(
    name="by_default",
    title="Without an option, against the full cache",
    takes="ten minutes",
    measure=_by_default,
    threads=1,
    options={
        "lengths": Size((1024, 2048, 6144), (96, 160)),
        "readings": Size(3, 2),
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


CODES = {"int8": (8, 8), "K8V4": (8, 4), "int4": (4, 4)}
LARGE = "a layer of Llama-3.1-8B"


def _of_shapes(given: RunContext, shapes: str, dtype: str) -> PreTrainedModel:
    """The model, or a layer with random weights and hardly any vocabulary."""
    if shapes != LARGE:
        return load(given.model, dtype=dtype).model
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=256,
    )
    return LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()


def _tokens_of_bytes(keys: int, values: int, tokens: int) -> int:
    """How many tokens take as many bytes as so many in 16 bits, whatever the model's dtype."""
    return int(tokens * 32 / (keys + values + 2 * 32 / KVCodes.group_size))


@torch.inference_mode()
def _coded(given: RunContext) -> Iterator[Row]:
    """A row per model, number of tokens and kind of codes; all of a model's caches take turns."""
    for shapes, dtype, tokens in given.cells:
        model = _of_shapes(given, shapes, dtype)
        asked: dict[Any, tuple[Any, int]] = {"16 bits": (None, tokens)}
        for name, (keys, values) in CODES.items():
            codes = KVCodes(keys, values)  # type: ignore[arg-type] # of those it takes
            asked[name, "tokens"] = codes, tokens
            asked[name, "bytes"] = codes, _tokens_of_bytes(keys, values, tokens)
        work = {
            key: _step(model, compressed("", SnapKV(kept), codes=codes), 1, kept + 64)
            for key, (codes, kept) in asked.items()
        }
        turns = Turns(work, rounds=given.new_tokens, warmup_rounds=3)
        for name in CODES:
            yield {
                "benchmark": "codes",
                "shapes": shapes,
                "dtype": dtype,
                "kept_tokens": tokens,
                "codes": name,
                "tokens_of_bytes": asked[name, "bytes"][1],
                "tokens": given.new_tokens,
                "ms_per_token": turns.ms("16 bits", 2),
                "cpu_ms_per_token": turns.ms("16 bits", 2, "cpu_ms"),
                **{
                    f"equal_{equal}{suffix}": turns.ratio((name, equal), "16 bits", clock=clock)
                    for equal in ("tokens", "bytes")
                    for suffix, clock in (("", "wall_ms"), ("_cpu", "cpu_ms"))
                },
            }


CODED = Experiment(
    name="codes",
    title="A step that reads few bits",
    takes="ten minutes",
    measure=_coded,
    threads=1,
    options={
        "cells": Size(
            (
                ("demo", "float32", 512),
                ("demo", "float32", 2048),
                ("demo", "bfloat16", 512),
                (LARGE, "bfloat16", 2048),
            ),
            (("demo", "float32", 96),),
        ),
        "new_tokens": Size(12, 2),
    },
    fields={"seed": SEED},
    tables=[
        Listing(
            {
                "model": "{shapes}, {dtype}",
                "tokens": "{kept_tokens:,}",
                "codes": "{codes}",
                "ms per token in 16 bits": "{cpu_ms_per_token[p50]:.1f}",
                "as many tokens": "{equal_tokens_cpu:spread|.2f}",
                "as many bytes": "{equal_bytes_cpu:spread|.2f}",
                "which are tokens": "{tokens_of_bytes:,}",
            }
        )
    ],
)
