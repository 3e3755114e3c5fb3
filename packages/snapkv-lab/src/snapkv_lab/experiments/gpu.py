"""What a GPU user sees: tokens and reading, in one call of at most ten minutes.

python -m snapkv_lab.experiments gpu  all parts, the most valuable first

python -m snapkv_lab.experiments gpu --part token     one of them

python -m snapkv_lab.experiments gpu --small  tiny sizes on a CPU, which tests run

Weights are random, in published shapes, so nothing is downloaded. The rows of a cell are stored as
soon as it is measured. A later call continues after a call that was interrupted, ran out of time,
or lost its device. A cell that failed has a row that says how, and is not tried again.
"""

import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snapkv import AdaKV, CompressedCache, FullCache, SnapKV, default_policy
from snapkv.hf.cache_argument import passed
from snapkv.policies import Policy
from snapkv.storage.bits import KVCodes
from snapkv.validation import first_line
from snapkv_app.prefills import LayerByLayer
from snapkv_lab.experiments.experiment import Experiment, RunContext, Size
from snapkv_lab.experiments.pages import Listing
from snapkv_lab.experiments.records import describe_environment
from snapkv_lab.measure.contenders import (
    Contender,
    Decoder,
    compressed_contender,
    transformers_contender,
)
from snapkv_lab.measure.prefill import PrefillBench
from snapkv_lab.measure.random_models import random_model
from snapkv_lab.measure.timing import percentiles
from snapkv_lab.rows import Row, group_rows

K = 1024
GRAPHS = ("full", "snapkv", "adakv", "snapkv int8", "snapkv int4", "default", "default K8V4")


def _device(context: RunContext) -> torch.device:
    if context.small:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        sys.exit("device: expected a CUDA device, but got none; pass --small to try it on a CPU")
    return torch.device("cuda", torch.cuda.current_device())


def _device_name(context: RunContext) -> str:
    """Return the name of the GPU, or of the CPU in a small run, which distinguishes the rows of
    different devices.

    Raises:
        SystemExit: there is no GPU, and the run is not a small one.
    """
    return str(describe_environment(_device(context))["processor"])


def _model(context: RunContext, shape: str) -> Any:
    """Return the model with random weights in the given shape, on the device of the run.

    The last model is kept in `context.model_held` and returned again. A model of another shape is
    dropped first, because a second may not fit.

    Raises:
        SystemExit: there is no GPU, and the run is not a small one.
        OutOfMemoryError: the weights do not fit on the device.
    """
    if context.model_held is None or context.model_held[0] != shape:
        context.model_held = None
        options = {"device": _device(context), "layers": context.layers or None}
        options["dtype"] = torch.float32 if context.small else torch.bfloat16
        context.model_held = shape, random_model(shape, **options)
    return context.model_held[1]


def _caches(budget: int) -> dict[str, Contender]:
    """Return all caches that are compared, by name. Compressed ones keep `budget` tokens per head,
    except "full", which keeps all.
    """
    snapkv, default = SnapKV(budget), default_policy(budget)
    declared = (
        ("full", FullCache(), None),
        ("snapkv", snapkv, None),
        ("snapkv, eager", snapkv, None),
        ("adakv", AdaKV(snapkv), None),
        ("snapkv int8", snapkv, "int8"),
        ("snapkv int4", snapkv, "int4"),
        ("default", default, None),
        ("default K8V4", default, "K8V4"),
    )
    return {
        name: transformers_contender(name) for name in ("transformers", "transformers-static")
    } | {
        name: compressed_contender(name, policy, codes=bits and KVCodes.of(bits))
        for name, policy, bits in declared
    }


def _token(context: RunContext, batch: int, length: int, name: str) -> Iterator[Row]:
    """Yield one row with the time that a cache needs per generated token. The first three tokens of
    an answer are left out of the percentiles and reported separately.

    Args:
        context: the run, with the shape of the model, the budget and the number of generated
            tokens.
        batch: how many rows the cache has.
        length: how many tokens the prompt of each row has.
        name: a key of `_caches`. With "transformers-static", the steps are compiled first.
    """
    contender = _caches(context.budget)[name]
    decoder = Decoder(contender, _model(context, context.shape), batch, length)
    if name == "transformers-static":
        decoder(4)  # compiles the steps before they are timed
    is_eager = name.endswith("eager")
    first, gaps = decoder.first_and_gaps(context.tokens, disable_compile=is_eager)
    ms = percentiles(gaps, 3)
    yield {
        "cache": name,
        "batch": batch,
        "length": length,
        "steps": decoder.steps,
        "ms_per_token": ms,
        "first_ms": round(first, 1),
        "tokens_per_second": round(1000 * batch / ms["p50"], 1),
        "held_bytes": decoder.held_bytes,
    }


def _reading(context: RunContext, length: int) -> Iterator[Row]:
    """Yield a row for each cache with the time that reading a prompt of `length` tokens takes. If
    the prompt has at least twice `chunk_tokens` of the run, reading it layer by layer is measured,
    too.
    """
    caches = _caches(context.budget)
    names = ("transformers", "snapkv", "adakv", "snapkv int4", "default", "default K8V4")
    contenders = [caches[name] for name in names]
    if length >= 2 * context.chunk_tokens:
        layers = LayerByLayer(chunk_tokens=context.chunk_tokens)
        contenders += [replace(caches["snapkv"], label="snapkv, layer by layer", prefill=layers)]
    model, shape = _model(context, context.shape), {"lengths": [length], "rounds": context.rounds}
    yield from PrefillBench(model=model, contenders=contenders, **shape).times()


def _long_reading(context: RunContext, length: int) -> Iterator[Row]:
    """Yield a row with the time and the peak memory of reading a prompt of `length` tokens layer by
    layer, with a model in the paper's 7B multi-head shape.
    """
    layers = LayerByLayer(chunk_tokens=context.chunk_tokens)
    contender = replace(_caches(context.budget)["snapkv"], prefill=layers)
    bench = PrefillBench(
        model=_model(context, context.paper_shape), contenders=[contender], lengths=[length]
    )
    started = time.monotonic()
    for row in bench.peaks():
        yield row | {"reading_seconds": round(time.monotonic() - started, 1)}


def _same_as_on_a_cpu(context: RunContext, name: str) -> Iterator[Row]:
    """Yield one row that compares a small model on the device with the same model on the CPU.

    Args:
        context: the run, with the length of the prompt and the budget.
        name: what is compared: "adakv" for this policy, "int4" for SnapKV in 4 bits, or "default"
            for the default policy.

    Returns:
        A row with "kept_alike", the share of the kept tokens that agrees in the worst head;
        "logits_differ", the largest difference of a logit relative to the largest logit; and
        "status", which is "ok" if more than 97 % agree.
    """
    policy: Policy = SnapKV(context.budget)
    if name != "int4":
        policy = AdaKV(policy) if name == "adakv" else default_policy(context.budget)
    bits = name if name == "int4" else None
    ids = torch.randint(1000, (1, context.same_tokens), generator=torch.Generator().manual_seed(0))
    kept, logits = _small_model(torch.device("cpu"), ids, policy, bits)
    kept_there, logits_there = _small_model(_device(context), ids, policy, bits)
    pairs = zip(kept, kept_there, strict=True)
    shared = min(float(torch.isin(own[own >= 0], there).float().mean()) for own, there in pairs)
    differs = float((logits_there - logits).abs().max() / logits.abs().max())
    yield {
        "cache": name,
        "tokens": context.same_tokens,
        "kept_alike": round(shared, 4),
        "logits_differ": float(f"{differs:.3g}"),
        "status": "ok" if shared > 0.97 else f"keeps {shared:.1%} of what a CPU keeps",
    }


@torch.no_grad()
def _small_model(
    device: torch.device, ids: Tensor, policy: Policy, bits: str | None
) -> tuple[list[Tensor], Tensor]:
    """Read a prompt on a device, and return the kept tokens of every head and the logits of a step.

    Args:
        device: where the model reads.
        ids: (1, T) int64, the prompt.
        policy: what is kept.
        bits: how keys and values are stored, such as "int4"; None for unquantized.

    Returns:
        An int64 vector for each head of each layer with the positions that it keeps, padded with
        -1; and the (1, 1, V) float32 logits of a decode step, for V tokens of the vocabulary. All
        are on the CPU.
    """
    options: dict[str, Any] = {"dtype": torch.float32, "layers": 2}
    model: Any = random_model("smollm2-135m", device=torch.device("cpu"), **options)
    model = model.to(device)
    cache = CompressedCache(model, policy, quantize=bits)  # type: ignore[arg-type]
    model(ids.to(device), **passed(cache), logits_to_keep=1)
    kept = [head for layer in cache.compressed_layers for head in cache.kept_positions(layer)[0]]
    logits = model(ids[:, :1].to(device), **passed(cache)).logits
    return [head.cpu() for head in kept], logits.float().cpu()


class Cell(NamedTuple):
    """A single measurement, whose rows are stored together.

    It takes about `seconds` on a large GPU. Its name is unique among the rows of a part and a
    device.
    """

    name: str
    seconds: float
    rows: Callable[[RunContext], Iterator[Row]]


def _cells(context: RunContext, part: str) -> Iterator[Cell]:
    device = _device_name(context)
    for name, seconds, rows, *arguments in DECLARED[part](context):
        yield Cell(f"{name}, {device}", seconds, lambda g, r=rows, a=arguments: r(g, *a))


DECLARED: dict[str, Callable[[RunContext], Iterator[tuple[Any, ...]]]] = {
    "like a CPU": lambda context: (
        (name, 10, _same_as_on_a_cpu, name) for name in ("default", "adakv", "int4")
    ),
    "token": lambda context: (
        (f"{batch} x {length}, {name}", 5, _token, batch, length, name)
        for batch, length, names in context.cells
        for name in names
    ),
    "reading": lambda context: ((f"{length}", 40, _reading, length) for length in context.lengths),
    "long reading": lambda context: (
        (f"{length}", length / 4096, _long_reading, length) for length in context.long_lengths
    ),
    "compiled": lambda context: (
        (f"1 x {length}", 45, _token, 1, length, "transformers-static")
        for length in context.compiled_lengths
    ),
}
"""For each part, a function that yields its cells: name, seconds, a function that measures the
cell, and its arguments.
"""


def _measured(context: RunContext, cell: Cell) -> Iterator[Row]:
    """Yield the rows of a single measurement, or a row which says that it failed.

    Nothing is yielded if too little time is left for the cell, or if the device was lost before.
    In both cases `context.over` is set, and all later cells are skipped.
    """
    seconds_left = 60 * context.minutes - (time.monotonic() - context.started)
    if seconds_left < cell.seconds and not context.over:
        context.over = f"{seconds_left:.0f} seconds are left"
    if context.over:
        print(
            f"not measured: {cell.name}: {context.over}; the same command continues",
            file=sys.stderr,
        )
        return
    started, rows = time.monotonic(), list[Row]()
    try:
        rows.extend(cell.rows(context))
    except Exception as error:  # the other cells can still be measured
        traceback.print_exc()
        rows = [{"status": f"failed: {type(error).__name__}: {first_line(error)[:300]}"}]
        context.over = _lost()
    torch.compiler.reset()  # all cells share one limit of compiled variants
    gc.collect()  # frees the cell's caches and graphs before the next cell allocates
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    seconds = round(time.monotonic() - started, 1)
    fields = {"text": cell.name, "device": _device_name(context)}
    yield from (fields | row | {"seconds": seconds} for row in rows)


def _lost() -> str:
    """Return why the device does not answer any more, or an empty text if it does or if there is no
    CUDA device.
    """
    if not torch.cuda.is_available():
        return ""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        return f"the device is lost ({first_line(error)})"
    return ""


def _announce(own: Experiment, context: RunContext) -> None:
    """Print to standard error what will run and about how long it takes.

    Raises:
        SystemExit: there is no GPU, and the run is not a small one.
    """
    lines, total = [f"{_device_name(context)}, about, in this order:"], 0.0
    for part in context.parts:
        every = list(_cells(context, part))
        todo = [cell.seconds for cell in own.remaining(context, part)]
        lines.append(f"{part:<16}{len(todo)} of {len(every)} cells, {sum(todo) / 60:.1f} minutes")
        total += sum(todo)
    lines.append(f"{total / 60:.0f} minutes, of {context.minutes:.0f} at most, into {own.rows}")
    print("\n".join(lines), file=sys.stderr)


def _is_measured(row: Row) -> bool:
    return row.get("status", "ok") == "ok"


def _pages(rows: list[Row]) -> Iterator[str]:
    for own in group_rows((row for row in rows if "device" in row), "device").values():
        for each in TABLES:
            yield from each.parts(list(filter(_is_measured, own)))
        yield from _FAILED.parts([row for row in own if not _is_measured(row)])


def _describe_origin(rows: list[Row]) -> str:
    environments = {str(row["environment"]): row["environment"] for row in rows if "run" in row}
    sentences = (
        "{processor}, torch {torch}, transformers {transformers}, snapkv {snapkv}".format_map(each)
        + (f", commit {each['commit']}" if each["commit"] else "")
        for each in environments.values()
    )
    return "; ".join(dict.fromkeys(sentences))


_TOKENS: Mapping[str, Any] = {
    "cache": "{cache}",
    "batch": "{batch}",
    "prompt tokens": "{length:,}",
    "ms per token": "{ms_per_token[p50]:.2f}",
    "tokens per second": "{tokens_per_second:,.0f}",
    "bytes held": "{held_bytes:bytes}",
    "the first three tokens, ms": "{first_ms:,.0f}",
    "steps": lambda row: str(row["steps"] or "transformers' own"),
}

TABLES = (
    Listing(
        {
            "cache": "{cache}",
            "kept alike": "{kept_alike:.1%}",
            "logits differ": "{logits_differ:.1e}",
        },
        "A small model, GPU against CPU, {tokens:,} tokens; {device}",
        {"part": "like a CPU"},
    ),
    Listing(_TOKENS, "A token; {device}", {"part": "token"}),
    Listing(
        _TOKENS, "A token of transformers' static cache, compiled; {device}", {"part": "compiled"}
    ),
    Listing(
        {
            "prompt tokens": "{length:,}",
            "cache": "{cache}",
            "ms": "{ms[p50]:,.0f}",
            "against the first": "{ratio:spread|.3f}",
        },
        "Reading a prompt; {device}",
        {"part": "reading"},
    ),
    Listing(
        {
            "prompt tokens": "{length:,}",
            "seconds": "{reading_seconds:.1f}",
            "peak": "{peak_growth_bytes:bytes}",
            "held after it": "{held_bytes:bytes}",
        },
        "Reading layer by layer, 7B multi-head; {device}",
        {"part": "long reading"},
    ),
)
_FAILED = Listing(
    {
        "part": "{part}",
        "cell": "{text}",
        "cache": lambda row: str(row.get("cache", "")),
        "status": "{status}",
    },
    "What failed; {device}",
)


GPU = Experiment(
    name="gpu",
    title="What a GPU user sees",
    duration="at most ten minutes on one",
    prepare=_announce,
    measure=dict.fromkeys(DECLARED, _measured),
    cases=_cells,
    describe=lambda context: {"environment": describe_environment(_device(context))},
    options={
        "minutes": 10.0,
        "shape": Size("llama-3.1-8b", "smollm2-135m"),
        "paper_shape": Size("lwm-7b", "smollm2-135m"),
        "layers": Size(0, 2),
        "budget": Size(1024, 96),
        "same_tokens": Size(4 * K, 300),
        "cells": Size(
            (
                (1, 16 * K, ("transformers", "snapkv, eager", *GRAPHS)),
                (16, 16 * K, ("transformers", *GRAPHS)),
                (1, 128 * K, ("transformers", "full", "snapkv", "default K8V4")),
                (1, K, ("transformers", "full", "snapkv", "default K8V4")),
                (24, 16 * K, ("transformers",)),
                (128, 16 * K, ("snapkv", "default K8V4")),
            ),
            ((1, 256, ("transformers", "snapkv, eager", *GRAPHS)), (2, 256, ("snapkv",))),
        ),
        "lengths": Size((4 * K, 32 * K), (256,)),
        "long_lengths": Size((128 * K, 380 * K), (512,)),
        "compiled_lengths": Size((16 * K, 128 * K), (256,)),
        "chunk_tokens": Size(16 * K, 128),
        "tokens": Size(48, 6),
        "rounds": Size(4, 2),
        "model_held": None,  # the shape and its model
        "over": None,  # the reason if nothing more is measured
    },
    origin=_describe_origin,
    tables=_pages,
)
