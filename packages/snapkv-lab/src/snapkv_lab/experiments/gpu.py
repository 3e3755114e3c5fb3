"""Everything that is measured on a GPU, in one call of at most forty minutes.

    python -m snapkv_lab.experiments gpu  all parts, most valuable first
    python -m snapkv_lab.experiments gpu --part decode   one of them
    python -m snapkv_lab.experiments gpu --small  tiny sizes on a CPU, so that this file cannot rot

Weights are random, in published shapes, so nothing is downloaded. Rows of a cell are stored as soon
as it is measured. A later call goes on after them: where one was cut off, where the time was over,
or where the device was lost. A cell that failed has a row that says how, and is not tried again.
"""

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from snapkv import AdaKV, CompressedCache, SnapKV, ops
from snapkv.policies import Policy
from snapkv.storage.bits import KVCodes
from snapkv.validation import first_line
from snapkv_lab.experiments.experiment import Experiment, RunContext, Size
from snapkv_lab.experiments.measuring import Turns
from snapkv_lab.experiments.medusa import figure_9
from snapkv_lab.experiments.pages import Listing
from snapkv_lab.experiments.records import describe_environment
from snapkv_lab.experiments.speed import appended, overhead
from snapkv_lab.measure.contenders import Contender, compressed, full
from snapkv_lab.measure.decode import DecodeBench, copy_bandwidth
from snapkv_lab.measure.prefill import PrefillBench
from snapkv_lab.measure.random_models import random_model
from snapkv_lab.measure.timing import spent_on
from snapkv_lab.report.tables import Pivot
from snapkv_lab.rows import Row, grouped

K = 1024


def _device(given: RunContext) -> torch.device:
    if given.small:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        sys.exit("device: expected a CUDA device, got none; pass --small to try it on a CPU")
    return torch.device("cuda", torch.cuda.current_device())


def _device_name(given: RunContext) -> str:
    """By which rows are told apart, so that a file can hold those of several."""
    return str(describe_environment(_device(given))["processor"])


def _dtype(given: RunContext) -> torch.dtype:
    return torch.float32 if given.small else torch.bfloat16


def _model(given: RunContext, shape: str) -> Any:
    """One at a time: a second would not fit everywhere."""
    if given.model_held is None or given.model_held[0] != shape:
        given.model_held = None
        made = {"device": _device(given), "dtype": _dtype(given), "layers": given.layers or None}
        given.model_held = shape, random_model(shape, **made)
    return given.model_held[1]


def _policies(budget: int) -> dict[str, Contender]:
    snapkv = SnapKV(budget)
    made = (
        compressed(f"snapkv@{budget}", snapkv),
        compressed(f"adakv@{budget}", AdaKV(snapkv)),
        compressed(f"snapkv@{budget} int8", snapkv, codes=KVCodes.of("int8")),
        compressed(f"snapkv@{budget} int4", snapkv, codes=KVCodes.of("int4")),
        compressed(f"snapkv@{budget}, graph", snapkv, storage="static"),
        compressed(
            f"snapkv@{budget} int4, graph", snapkv, storage="static", codes=KVCodes.of("int4")
        ),
    )
    names = ("snapkv", "adakv", "int8", "int4", "static", "static int4")
    return dict(zip(names, made, strict=True))


def _states(given: RunContext, tokens: int) -> tuple[Tensor, Tensor, float]:
    """Random queries of a window, keys of a layer, and what scales their scores."""
    text = _model(given, given.shape).config
    head_dim = text.hidden_size // text.num_attention_heads
    queries, keys = (
        torch.randn(1, heads, count, head_dim, device=_device(given), dtype=_dtype(given))
        for heads, count in ((text.num_attention_heads, 32), (text.num_key_value_heads, tokens))
    )
    return queries, keys, head_dim**-0.5


def _operations(given: RunContext) -> dict[str, Callable[[str], Tensor]]:
    """What has a kernel, as a function of the implementation."""
    queries, keys, scaling = _states(given, given.kernel_tokens)
    scores = ops.ScoreOptions(scaling=scaling)
    heads, (tokens, head_dim) = keys.shape[1], keys.shape[2:]
    tail, votes = keys[:, :, :64], torch.rand(1, heads, tokens, device=keys.device)
    # Heads of which the first keeps least; blocks of 32 tokens.
    lengths = tuple((head + 1) * tokens // (2 * heads) for head in range(heads))
    ragged = keys[0, 0].repeat(heads, 1)[: sum(lengths)]
    layout = ops.BlockLayout(((lengths,),), 32, keys.device)
    blocks = keys[0].flatten(0, 1)[: 32 * (heads * tokens // 32)].view(-1, 32, head_dim)
    blocks = blocks.repeat(2, 1, 1)[: len(layout.heads)]
    coded = [ops.encode(blocks, 4, along=along) for along in ("tokens", "channels")]
    last = queries[:, :, -1:]

    def attended(operation: Any, first: Any, second: Any, layout: Any, impl: str) -> Tensor:
        attended_to = (first, second, layout, tail, tail, scores)
        return operation(last, *attended_to, impl=impl)  # type: ignore[no-any-return]

    uneven = ops.RaggedLayout((lengths,), keys.device)
    return {
        "window_votes": lambda impl: ops.window_votes(
            queries, keys, scores, group_reduce="mean", impl=impl
        ),
        "fade_votes": lambda impl: ops.fade_votes(votes, 0.9, impl=impl),
        "ragged_attention": lambda impl: attended(
            ops.ragged_attention, ragged, ragged, uneven, impl
        ),
        "coded_attention": lambda impl: attended(ops.coded_attention, *coded, layout, impl),
    }


def _kernel(given: RunContext, operation: str) -> Iterator[Row]:
    """What "auto" runs here against the reference: the largest difference, and the time."""
    run = _operations(given)[operation]
    expected, got = run("reference").float(), run("auto").float()
    differs = float(((got - expected).abs().max() / expected.abs().max()).cpu())
    work = {impl: partial(run, impl) for impl in ("reference", "auto")}
    turns = Turns(work, rounds=given.rounds)
    yield {
        "operation": operation,
        "tokens": given.kernel_tokens,
        "dtype": str(_dtype(given)).removeprefix("torch."),
        "of_largest": float(f"{differs:.3g}"),
        "status": "ok" if differs <= given.may_differ else f"differs by {differs:.2%}",
        "ms": turns.ms("auto", 4),
        "reference_ms": turns.ms("reference", 4),
    }


def _same_as_on_a_cpu(given: RunContext, name: str) -> Iterator[Row]:
    """A small model in float32: how many of the kept tokens are those of a CPU, and the logits."""
    policy = AdaKV(SnapKV(given.budget)) if name == "adakv" else SnapKV(given.budget)
    bits = name if name.startswith("int") else None
    ids = torch.randint(1000, (1, given.same_tokens), generator=torch.Generator().manual_seed(0))
    kept, logits = _small_model(torch.device("cpu"), ids, policy, bits)
    kept_there, logits_there = _small_model(_device(given), ids, policy, bits)
    shared = min(map(_share, kept, kept_there))
    differs = float((logits_there - logits).abs().max() / logits.abs().max())
    yield {
        "cache": name,
        "tokens": given.same_tokens,
        "kept_alike": round(shared, 4),
        "logits_differ": float(f"{differs:.3g}"),
        "status": "ok" if shared > 0.97 else f"keeps {shared:.1%} of what a CPU keeps",
    }


@torch.no_grad()
def _small_model(
    device: torch.device, ids: Tensor, policy: Policy, bits: str | None
) -> tuple[list[Tensor], Tensor]:
    """What every head keeps of a prompt, -1 filled up with, and the logits of a step after it."""
    made: dict[str, Any] = {"dtype": torch.float32, "layers": 2}
    model: Any = random_model("smollm2-135m", device=torch.device("cpu"), **made)
    model = model.to(device)
    cache = CompressedCache(model, policy, quantize=bits)  # type: ignore[arg-type]
    model(ids.to(device), past_key_values=cache, logits_to_keep=1)
    kept = [head for layer in cache.compressed_layers for head in cache.kept_positions(layer)[0]]
    logits = model(ids[:, :1].to(device), past_key_values=cache).logits
    return [head.cpu() for head in kept], logits.float().cpu()


def _share(here: Tensor, there: Tensor) -> float:
    return float(torch.isin(here[here >= 0], there).float().mean())


def _decode(
    given: RunContext, length: int, batch: int, baseline: str, ours: Sequence[str]
) -> Iterator[Row]:
    """Time per token against one of transformers' caches."""
    policies = _policies(given.budget)
    yield from DecodeBench(
        model=_model(given, given.shape),
        contenders=[*([full(baseline)] if baseline else ()), *(policies[name] for name in ours)],
        lengths=[length],
        batches=[batch],
        tokens=given.tokens,
        rounds=given.rounds,
        bytes_per_second=copy_bandwidth(_device(given)),
    ).rows()


def _paper_cell(given: RunContext, storage: str) -> Iterator[Row]:
    """The paper's cell: a 7B multi-head shape, 16k, batch 2, capacity 2048 (Fig. 7)."""
    yield from DecodeBench(
        model=_model(given, given.paper_shape),
        contenders=[full("transformers"), _policies(given.paper_budget)[storage]],
        lengths=[given.paper_length],
        batches=[2],
        tokens=given.tokens,
        rounds=given.rounds,
    ).rows()


def _votes(given: RunContext, impl: str, reads: int) -> Iterator[Row]:
    """The vote over all keys of a layer: time, and share of the copy bandwidth.

    "of_ceiling" counts the keys once, "of_bandwidth" as often as they are read.
    """
    queries, keys, scaling = _states(given, given.prefill_length)
    least = 1000 * keys.nbytes / copy_bandwidth(_device(given))
    scores = ops.ScoreOptions(scaling=scaling)
    vote = partial(ops.window_votes, queries, keys, scores, group_reduce="mean", impl=impl)
    ms = Turns({impl: vote}, rounds=10).ms(impl, 4)
    yield {
        "impl": impl,
        "length": given.prefill_length,
        "ms": ms,
        "of_ceiling": round(least / ms["p50"], 4),
        "of_bandwidth": round(reads * least / ms["p50"], 4),
    }


def _prefill(given: RunContext) -> Iterator[Row]:
    """What compression adds to reading a prompt, in time and at the peak of memory."""
    bench = PrefillBench(
        model=_model(given, given.shape),
        contenders=[full("transformers"), _policies(given.budget)["snapkv"]],
        lengths=[given.prefill_length],
        rounds=given.rounds,
    )
    yield from bench.times()
    if _device(given).type == "cuda":
        yield from bench.peaks()


def _overhead(given: RunContext) -> Iterator[Row]:
    model = _model(given, given.shape)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, given.prefill_length), generator=generator)
    yield overhead(model, ids.to(_device(given)), SnapKV(given.budget), given.rounds)


def _appending(given: RunContext, batch: int, stored: int) -> Iterator[Row]:
    yield from appended(
        _model(given, given.shape),
        cells=[(batch, stored)],
        prompt_tokens=4 * stored,
        tokens=given.tokens,
    )


def _medusa(given: RunContext, length: int) -> Iterator[Row]:
    """Figure 9 on the paper's shape: steps with and without heads, on full and small caches."""
    yield from figure_9(
        _model(given, given.paper_shape),
        lengths=[length],
        budget=given.budget,
        tokens=2 * given.tokens,
        rounds=given.rounds,
    )


def _long_prefill(given: RunContext, length: int) -> Iterator[Row]:
    """A prompt far beyond one pass, layer by layer.

    All weights are there; the model is cut to as many layers as the time for one of them allows
    for, and the row says how many.
    """
    model = _model(given, given.shape)
    every = model.config.num_hidden_layers
    _, seconds = _of_layers(given, model, length, 1)
    layers = max(1, min(every, int(given.long_seconds / seconds)))
    rows, seconds = _of_layers(given, model, length, layers)
    for row in rows:
        yield row | {"reading_seconds": round(seconds, 1), "layers": layers, "of_layers": every}


def _of_layers(given: RunContext, model: Any, length: int, layers: int) -> tuple[list[Row], float]:
    """The peaks of a compressed cache read layer by layer, and the seconds that took."""
    decoder, every = model.get_decoder(), model.config.num_hidden_layers
    whole, model.config.num_hidden_layers = decoder.layers, layers
    decoder.layers = whole[:layers]
    try:
        bench = PrefillBench(
            model=model,
            contenders=[_policies(given.budget)["snapkv"]],
            lengths=[length],
            chunk_tokens=given.chunk_tokens,
        )
        rows: list[Row] = []
        ms = spent_on(lambda: rows.extend(bench.peaks())).wall_ms
        return rows, ms / 1000
    finally:
        decoder.layers, model.config.num_hidden_layers = whole, every


@dataclass(frozen=True)
class Cell:
    """What is measured and stored at once.

    Attributes:
        name: unique among the rows of a part and a device.
        seconds: about how long it takes on a large GPU, an estimate; rows say what it took.
        rows: measures it.
    """

    name: str
    seconds: float
    rows: Callable[[RunContext], Iterator[Row]]


def _cells(given: RunContext, part: str) -> Iterator[Cell]:
    device = _device_name(given)
    for name, seconds, rows, *arguments in DECLARED[part](given):
        yield Cell(f"{name}, {device}", seconds, lambda g, r=rows, a=arguments: r(g, *a))


STEPS = {
    "decode": (20, "transformers", ("static", "static int4")),
    "eager": (40, "transformers", ("snapkv", "adakv", "int8", "int4")),
    "compiled": (100, "transformers-static", ("static",)),
}
"""How steps run, by part: seconds, what they are compared with, and what is measured."""


def _decode_cells(part: str, given: RunContext) -> Iterator[tuple[Any, ...]]:
    """The length of batches comes first: one row and many, so that a short call has both."""
    seconds, baseline, ours = STEPS[part]
    length = given.batch_length
    cells = [(1, length), (given.batches[0], length)]
    cells += [(1, other) for other in given.lengths if other != length]
    cells += [(batch, length) for batch in given.batches[1:]]
    for batch, length in cells:
        yield f"{batch} x {length}", seconds, _decode, length, batch, baseline, ours


DECLARED: dict[str, Callable[[RunContext], Iterator[tuple[Any, ...]]]] = {
    "kernels": lambda given: ((name, 10, _kernel, name) for name in OPERATIONS),
    "like a CPU": lambda given: (
        (name, 10, _same_as_on_a_cpu, name) for name in ("snapkv", "adakv", "int4")
    ),
    "paper cell": lambda given: (
        (name, seconds, _paper_cell, name) for name, seconds in (("snapkv", 40), ("static", 90))
    ),
    "votes": lambda given: (
        (impl, 8, _votes, impl, reads)  # how often each reads the keys
        for impl, reads in (("reference", 1), ("blocked", 2), ("triton", 2))
        if impl != "triton" or not given.small
    ),
    **{part: partial(_decode_cells, part) for part in STEPS},
    "prefill": lambda given: iter(
        (("reading", 60, _prefill), ("vote, selection and gather", 30, _overhead))
    ),
    "appending": lambda given: (
        (f"{batch} x {stored}", 10, _appending, batch, stored) for batch, stored in given.cells
    ),
    "medusa": lambda given: ((f"{length}", 60, _medusa, length) for length in given.draft_lengths),
    "long prefill": lambda given: (
        (f"{length}", 240, _long_prefill, length) for length in given.long_lengths
    ),
}
"""By part: name, seconds, and what measures it with its arguments, for each cell."""

OPERATIONS = ("window_votes", "fade_votes", "ragged_attention", "coded_attention")


def _measured(given: RunContext, cell: Cell) -> Iterator[Row]:
    """The rows of a cell, or one that says how it failed; none where it is left to a later call."""
    left = 60 * given.minutes - (time.monotonic() - given.started)
    if left < cell.seconds and not given.over:
        given.over = f"{left:.0f} seconds are left"
    if given.over:
        print(f"not measured: {cell.name}: {given.over}; the same command goes on", file=sys.stderr)
        return
    started, rows = time.monotonic(), list[Row]()
    try:
        rows.extend(cell.rows(given))
    except Exception as error:  # whatever it is, the other cells are worth their time
        traceback.print_exc()
        rows = [{"status": f"failed: {type(error).__name__}: {first_line(error)[:300]}"}]
        given.over = _lost()
    torch.compiler.reset()  # a limit of compiled variants holds for all cells together
    seconds = round(time.monotonic() - started, 1)
    named = {"text": cell.name, "device": _device_name(given)}
    yield from (named | row | {"seconds": seconds} for row in rows)


def _lost() -> str:
    """Why the device answers no more, after which no other cell of this process can; or nothing."""
    if not torch.cuda.is_available():
        return ""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        return f"the device is lost ({first_line(error)})"
    return ""


def _announce(own: Experiment, given: RunContext) -> None:
    """Say what will run and how long that takes, about; end in one line where no GPU is."""
    lines, total = [f"{_device_name(given)}, about, in this order:"], 0.0
    for part in given.parts:
        every = list(_cells(given, part))
        left = [cell.seconds for cell in own.remaining(given, part)]
        lines.append(f"{part:<16}{len(left)} of {len(every)} cells, {sum(left) / 60:.1f} minutes")
        total += sum(left)
    lines.append(f"{total / 60:.0f} minutes, of {given.minutes:.0f} at most, into {own.rows}")
    print("\n".join(lines), file=sys.stderr)


def _is_measured(row: Row) -> bool:
    return row.get("status", "ok") == "ok"


def _pages(rows: list[Row]) -> Iterator[str]:
    for own in grouped((row for row in rows if "device" in row), "device").values():
        for each in TABLES:
            yield from each.parts(list(filter(_is_measured, own)))
        yield from _FAILED.parts([row for row in own if not _is_measured(row)])


def _measured_on(rows: list[Row]) -> str:
    found = {str(row["environment"]): row["environment"] for row in rows if "run" in row}
    said = (
        "{processor}, torch {torch}, transformers {transformers}, snapkv {snapkv}".format_map(each)
        + (f", commit {each['commit']}" if each["commit"] else "")
        for each in found.values()
    )
    return "; ".join(dict.fromkeys(said))


_DECODING = {
    "batch": "{batch}",
    "prompt tokens": "{length:,}",
    "cache": "{cache}",
    "ms per token": "{ms_per_token[p50]:.2f}",
    "against the first": "{ratio:spread|.3f}",
    "bytes held": "{held_bytes:bytes}",
}
_PEAKS = {
    "prompt tokens": "{length:,}",
    "cache": "{cache}",
    "peak": "{peak_growth_bytes:bytes}",
    "held after it": "{held_bytes:bytes}",
}

TABLES = (
    Listing(
        {
            "operation": "{operation}",
            "largest difference": "{of_largest:.1e}",
            "ms": "{ms[p50]:.3f}",
            "reference, ms": "{reference_ms[p50]:.3f}",
        },
        "Kernels against the reference, {tokens:,} tokens, {dtype}; {device}",
        {"part": "kernels"},
    ),
    Listing(
        {
            "cache": "{cache}",
            "kept alike": "{kept_alike:.1%}",
            "logits differ": "{logits_differ:.1e}",
        },
        "A small model, GPU against CPU, {tokens:,} tokens; {device}",
        {"part": "like a CPU"},
    ),
    Listing(_DECODING, "The paper's cell; {device}", {"part": "paper cell"}),
    Listing(
        {
            "implementation": "{impl}",
            "ms": "{ms[p50]:.3f}",
            "of a single reading": "{of_ceiling:.1%}",
            "of bandwidth": "{of_bandwidth:.1%}",
        },
        "The vote of a layer, {length:,} tokens; {device}",
        {"part": "votes"},
    ),
    *(
        Listing(
            _DECODING | {"of ceiling": "{of_ceiling:.1%}"}, f"{named}; {{device}}", {"part": part}
        )
        for part, named in zip(
            STEPS, ("Decoding by graphs", "Eager decoding", "Compiled decoding"), strict=True
        )
    ),
    Listing(
        {
            "prompt tokens": "{length:,}",
            "cache": "{cache}",
            "ms": "{ms[p50]:,.0f}",
            "against the first": "{ratio:spread|.3f}",
        },
        "Reading; {device}",
        {"part": "prefill", "bench": "prefill"},
    ),
    Listing(_PEAKS, "Memory while reading; {device}", {"part": "prefill", "bench": "memory"}),
    Listing(
        {
            "prompt tokens": "{prompt_tokens:,}",
            "reading, ms": "{reading_ms[p50]:,.0f}",
            "compressing, ms": "{compressing_ms[p50]:.1f}",
            "share": "{share[p50]:.2%}",
        },
        "Vote, selection and gather; {device}",
        {"part": "prefill", "benchmark": "overhead"},
    ),
    Listing(
        {
            "batch": "{batch}",
            "stored tokens": "{stored_tokens:,}",
            "in place, ms": "{ms[p50]:.2f}",
            "copying, ms": "{copying_ms[p50]:.2f}",
            "ratio": "{ratio[p50]:.3f}",
        },
        "Appending in place; {device}",
        {"part": "appending"},
    ),
    Listing(
        Pivot("way", "{contender}", "{length:,} tokens, ms", "{ms_per_token[p50]:.2f}"),
        "Medusa, {acceptance_length:.1f} tokens a step: {acceptance}; {device}",
        {"part": "medusa"},
        lambda rows: sorted(rows, key=lambda row: row["length"]),
    ),
    Listing(
        _PEAKS | {"seconds": "{reading_seconds:.1f}", "layers": "{layers} of {of_layers}"},
        "Reading layer by layer; {device}",
        {"part": "long prefill"},
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
    title="Everything that is measured on a GPU",
    takes="at most forty minutes on one",
    before=_announce,
    measure=dict.fromkeys(DECLARED, _measured),
    cases=_cells,
    described=lambda given: {"environment": describe_environment(_device(given))},
    options={
        "minutes": 40.0,
        "shape": Size("llama-3.1-8b", "smollm2-135m"),
        "paper_shape": Size("lwm-7b", "smollm2-135m"),
        "layers": Size(0, 2),
        "budget": Size(1024, 96),
        "paper_budget": Size(2048, 128),
        "kernel_tokens": Size(32 * K, 300),
        "may_differ": 0.02,
        "same_tokens": Size(4 * K, 300),
        "lengths": Size((1 * K, 16 * K, 128 * K), (256, 512)),
        "batches": Size((16, 64, 192), (2,)),
        "batch_length": Size(16 * K, 256),
        "cells": Size(((1, K), (8, K), (32, K)), ((1, 64), (2, 128))),
        "paper_length": Size(16 * K, 256),
        "draft_lengths": Size((4 * K, 10 * K), (96,)),
        "prefill_length": Size(32 * K, 256),
        "long_lengths": Size((512 * K, 1024 * K), (512,)),
        "chunk_tokens": Size(16 * K, 128),
        "long_seconds": Size(150.0, 60.0),
        "tokens": Size(32, 2),
        "rounds": Size(5, 2),
        "model_held": None,  # by its shape
        "over": None,  # why nothing more is measured
    },
    measured=_measured_on,
    tables=_pages,
)
