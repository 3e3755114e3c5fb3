"""Everything that is measured on a GPU, in one call of less than ten minutes.

    python -m snapkv_lab.experiments gpu  all parts; rows are added to docs/results/gpu.jsonl
    python -m snapkv_lab.experiments gpu --part decode   one of them
    python -m snapkv_lab.experiments gpu --small  tiny sizes on a CPU, so that this file cannot rot

With `--kvpress-python`, kvpress's SnapKV is measured beside the paper's cell and reading, in an
environment of its own.

Weights are random, in published shapes. A row is written as soon as it is measured; a part that
the time left is too short for is skipped, and a row says so.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from snapkv import SnapKV, ops
from snapkv.errors import SnapKVError
from snapkv_lab.experiments.experiment import Experiment, Given, Sized
from snapkv_lab.experiments.kvpress import Kvpress
from snapkv_lab.experiments.measuring import Turns
from snapkv_lab.experiments.medusa import figure_9
from snapkv_lab.experiments.records import RESULTS, Row, describe_environment
from snapkv_lab.experiments.speed import appended, overhead
from snapkv_lab.measure.contenders import Contender, compressed, full
from snapkv_lab.measure.decode import DecodeBench, copy_bandwidth
from snapkv_lab.measure.prefill import PrefillBench
from snapkv_lab.measure.random_models import random_model
from snapkv_lab.measure.timing import spent_on

K = 1024


def _device(given: Given) -> torch.device:
    if not given.small and not torch.cuda.is_available():
        sys.exit("expected a CUDA device, got none; pass --small to try it on a CPU")
    return torch.device("cpu" if given.small else "cuda")


def _model(given: Given, shape: str) -> Any:
    device = _device(given)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return random_model(shape, device=device, dtype=dtype, layers=given.layers or None)


def _policies(budget: int) -> list[Contender]:
    snapkv = SnapKV(budget)
    return [
        compressed(f"snapkv@{budget} static", snapkv, storage="static"),
        compressed(f"snapkv@{budget} dynamic", snapkv),
    ]


@contextlib.contextmanager
def _beside(model: Any, budget: int, given: Given) -> Iterator[list[Kvpress]]:
    """kvpress's SnapKV in its own process, where its environment is given."""
    if not given.kvpress_python:
        yield []
        return
    label = f"kvpress snapkv@{budget}"
    with Kvpress(label, given.kvpress_python, model, SnapKV(budget)) as theirs:
        yield [theirs]


def _decode(given: Given) -> Iterator[Row]:
    """Time per token against transformers' caches, by length and batch."""
    common: dict[str, Any] = {
        "model": _model(given, given.shape),
        "tokens": given.tokens,
        "rounds": given.rounds,
        "bytes_per_second": copy_bandwidth(_device(given)),
    }
    ours = _policies(given.budget)
    everything = [full("transformers"), full("transformers-static"), *ours]
    sizes = {"lengths": given.lengths, "batches": given.batches}
    yield from DecodeBench(contenders=everything, **sizes, **common).rows()
    for row in DecodeBench(contenders=ours[:1], lengths=given.flat_lengths, **common).rows():
        yield row | {"part": "flat"}


def _paper_cell(given: Given) -> Iterator[Row]:
    """The paper's cell: a 7B multi-head shape, 16k, batch 2, capacity 2048 (Fig. 7)."""
    model, budget = _model(given, given.paper_shape), given.paper_budget
    with _beside(model, budget, given) as theirs:
        yield from DecodeBench(
            model=model,
            contenders=[full("transformers"), *theirs, *_policies(budget)],
            lengths=[given.paper_length],
            batches=[2],
            tokens=given.tokens,
            rounds=given.rounds,
        ).rows()


def _appending(given: Given) -> Iterator[Row]:
    model, length = _model(given, given.shape), given.lengths[0]
    yield from appended(model, cells=given.cells, prompt_tokens=length, tokens=given.tokens)


def _votes(given: Given) -> Iterator[Row]:
    """The vote over all keys of a layer: time, and share of the copy bandwidth.

    "of_ceiling" counts the keys once, "of_bandwidth" as often as they are read.
    """
    device, length = _device(given), given.prefill_length
    text = _model(given, given.shape).config
    head_dim = text.hidden_size // text.num_attention_heads
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    queries, keys = (
        torch.randn(1, heads, tokens, head_dim, device=device, dtype=dtype)
        for heads, tokens in ((text.num_attention_heads, 32), (text.num_key_value_heads, length))
    )
    least = 1000 * keys.nbytes / copy_bandwidth(device)
    scores = ops.ScoreOptions(scaling=head_dim**-0.5)
    impls = {"reference": 1, "blocked": 2, "triton": 2}  # how often each reads the keys
    for impl, reads in impls.items():
        if impl == "triton" and device.type != "cuda":
            continue
        vote: Callable[[], Any] = partial(
            ops.window_votes, queries, keys, scores, group_reduce="mean", impl=impl
        )
        ms = Turns({impl: vote}, rounds=10).ms(impl, 4)
        yield {
            "bench": "votes",
            "impl": impl,
            "length": length,
            "ms": ms,
            "of_ceiling": round(least / ms["p50"], 4),
            "of_bandwidth": round(reads * least / ms["p50"], 4),
        }


def _prefill(given: Given) -> Iterator[Row]:
    """What compression adds to reading a prompt, in time and at the peak of memory."""
    device, model = _device(given), _model(given, given.shape)
    with _beside(model, given.budget, given) as theirs:
        bench = PrefillBench(
            model=model,
            contenders=[full("transformers"), *theirs, _policies(given.budget)[1]],
            lengths=[given.prefill_length],
            rounds=given.rounds,
        )
        yield from bench.times()
        if device.type == "cuda":
            yield from bench.peaks()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, given.prefill_length), generator=generator)
    yield overhead(model, ids.to(device), SnapKV(given.budget), given.rounds)


def _long_prefill(given: Given) -> Iterator[Row]:
    """Prompts far beyond one pass, layer by layer under a cap of memory.

    All weights are there; where the time does not suffice for all layers, the model is cut to as
    many as it does for, and the row says how many.
    """
    cap = given.memory_gb * 1e9
    if _device(given).type == "cuda":
        total = torch.cuda.get_device_properties(_device(given)).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total))
    model = _model(given, given.shape)
    decoder, every = model.get_decoder(), model.config.num_hidden_layers
    seconds_per_pair = 0.0
    for length in given.long_lengths:
        layers = every
        if seconds_per_pair:
            layers = min(every, int(given.long_seconds / (seconds_per_pair * length**2)) or 1)
        whole, model.config.num_hidden_layers = decoder.layers, layers
        decoder.layers = whole[:layers]
        rows, seconds = _peaks(given, model, [length])
        decoder.layers, model.config.num_hidden_layers = whole, every
        seconds_per_pair = seconds / layers / length**2
        for row in rows:
            yield row | {
                "seconds": round(seconds, 1),
                "layers_run": layers,
                "layers_held": every,
                "memory_cap_bytes": int(cap),
            }


def _chunked_prefill(given: Given) -> Iterator[Row]:
    """The longest prompt again, whole, with every layer held to a cap between pieces."""
    model, longest = _model(given, given.shape), given.long_lengths[-1:]
    rows, seconds = _peaks(given, model, longest, cap_tokens=given.cap_tokens)
    yield from (row | {"seconds": round(seconds, 1)} for row in rows)


def _peaks(
    given: Given, model: Any, lengths: Sequence[int], **options: int
) -> tuple[list[Row], float]:
    """The peaks of a compressed cache that reads in pieces, and the seconds that took."""
    bench = PrefillBench(
        model=model,
        contenders=[_policies(given.budget)[1]],
        lengths=lengths,
        chunk_tokens=given.chunk_tokens,
        **options,
    )
    rows: list[Row] = []
    ms = spent_on(lambda: rows.extend(bench.peaks())).wall_ms
    return rows, ms / 1000


def _medusa(given: Given) -> Iterator[Row]:
    """Figure 9 on the paper's shape: steps with and without heads, on full and small caches."""
    yield from figure_9(
        _model(given, given.paper_shape),
        lengths=given.draft_lengths,
        budget=given.budget,
        tokens=2 * given.tokens,
        rounds=given.rounds,
    )


def _in_time(
    name: str, part: Callable[[Given], Iterator[Row]], needed: float, given: Given
) -> Iterator[Row]:
    """The rows of a part, or one that says why there are none, or no more."""
    left = 60 * given.minutes - (time.monotonic() - given.started)
    if left < needed:
        yield {"bench": name, "status": f"skipped: {left:.0f} seconds were left"}
        return
    try:
        yield from part(given)
    except SnapKVError as error:
        yield {"bench": name, "status": f"failed: {error}"}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


PARTS: dict[str, tuple[Callable[[Given], Iterator[Row]], float]] = {
    "paper cell": (_paper_cell, 40),
    "votes": (_votes, 20),
    "decode": (_decode, 180),
    "appending": (_appending, 20),
    "prefill": (_prefill, 40),
    "medusa": (_medusa, 60),
    "chunked prefill": (_chunked_prefill, 60),
    "long prefill": (_long_prefill, 180),
}
"""Every part and about how many seconds it takes on a large GPU."""

GPU = Experiment(
    name="gpu",
    title="Everything that is measured on a GPU",
    takes="ten minutes on one",
    measure={name: partial(_in_time, name, part, needed) for name, (part, needed) in PARTS.items()},
    described=lambda given: {
        "environment": describe_environment(_device(given)),
        "budget": given.budget,
    },
    appends=True,
    options={
        "output": str(RESULTS / "gpu.jsonl"),
        "minutes": 9.5,
        "kvpress_python": "",
        "shape": Sized("llama-3.1-8b", "smollm2-135m"),
        "paper_shape": Sized("lwm-7b", "smollm2-135m"),
        "layers": Sized(0, 2),
        "budget": Sized(1024, 96),
        "paper_budget": Sized(2048, 128),
        "lengths": Sized((4 * K, 16 * K, 64 * K, 128 * K), (256, 512)),
        "flat_lengths": Sized((4 * K, 256 * K), (256, 1024)),
        "batches": Sized((1, 2, 8, 32), (1, 2)),
        "cells": Sized(((1, K), (8, K), (32, K)), ((1, 64), (2, 128))),
        "paper_length": Sized(16 * K, 256),
        "draft_lengths": Sized((4 * K, 10 * K), (96,)),
        "prefill_length": Sized(32 * K, 256),
        "long_lengths": Sized((512 * K, 1024 * K), (512,)),
        "chunk_tokens": Sized(16 * K, 128),
        "cap_tokens": Sized(32 * K, 256),
        "memory_gb": 80.0,
        "long_seconds": Sized(150.0, 60.0),
        "tokens": Sized(32, 2),
        "rounds": Sized(5, 2),
    },
)
