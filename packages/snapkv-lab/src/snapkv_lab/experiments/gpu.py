"""Everything that is measured on a GPU, in one call of less than ten minutes.

    python -m snapkv_lab.experiments gpu  all parts; rows are added to docs/results/gpu.jsonl
    python -m snapkv_lab.experiments gpu --part decode   one of them
    python -m snapkv_lab.experiments gpu --small  tiny sizes on a CPU, so that this file cannot rot

With `--kvpress-python`, kvpress's SnapKV is measured beside the paper's cell and reading, in an
environment of its own.

Weights are random, in published shapes. A row is written as soon as it is measured; a part that
the time left is too short for is skipped, and a row says so.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from snapkv import SnapKV, ops
from snapkv.errors import SnapKVError
from snapkv_lab.experiments import appending
from snapkv_lab.experiments.environment import describe_environment
from snapkv_lab.experiments.kvpress_process import Kvpress
from snapkv_lab.experiments.medusa_gpu import figure_9
from snapkv_lab.experiments.prefill import measure_overhead
from snapkv_lab.experiments.records import RESULTS, Row
from snapkv_lab.measure.contenders import Contender, compressed, full
from snapkv_lab.measure.decode import DecodeBench, copy_bandwidth
from snapkv_lab.measure.prefill import PrefillBench
from snapkv_lab.measure.random_models import random_model
from snapkv_lab.measure.timing import spent_on, spread

ROWS = RESULTS / "gpu.jsonl"
K = 1024


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured; `SMALL` is the same on a CPU.

    Attributes:
        layers: fewer layers than the shapes have; None for all.
        memory_gb: cap on the device's memory for the long prefill.
        long_seconds: how long the longest prefill may take.
        kvpress_python: the interpreter of an environment with kvpress; None leaves it out.
    """

    shape: str = "llama-3.1-8b"
    paper_shape: str = "lwm-7b"
    layers: int | None = None
    budget: int = 1024
    paper_budget: int = 2048
    lengths: tuple[int, ...] = (4 * K, 16 * K, 64 * K, 128 * K)
    flat_lengths: tuple[int, ...] = (4 * K, 256 * K)
    batches: tuple[int, ...] = (1, 2, 8, 32)
    appended: tuple[tuple[int, int], ...] = ((1, K), (8, K), (32, K))
    paper_length: int = 16 * K
    draft_lengths: tuple[int, ...] = (4 * K, 10 * K)
    prefill_length: int = 32 * K
    long_lengths: tuple[int, ...] = (512 * K, 1024 * K)
    chunk_tokens: int = 16 * K
    cap_tokens: int = 32 * K
    memory_gb: float = 80.0
    long_seconds: float = 150.0
    tokens: int = 32
    rounds: int = 5
    kvpress_python: Path | None = None


SMALL = Sizes(
    shape="smollm2-135m",
    paper_shape="smollm2-135m",
    layers=2,
    budget=96,
    paper_budget=128,
    lengths=(256, 512),
    flat_lengths=(256, 1024),
    batches=(1, 2),
    appended=((1, 64), (2, 128)),
    paper_length=256,
    draft_lengths=(96,),
    prefill_length=256,
    long_lengths=(512,),
    chunk_tokens=128,
    cap_tokens=256,
    long_seconds=60.0,
    tokens=2,
    rounds=2,
)


def _policies(budget: int) -> list[Contender]:
    snapkv = SnapKV(budget)
    return [
        compressed(f"snapkv@{budget} static", snapkv, storage="static"),
        compressed(f"snapkv@{budget} dynamic", snapkv),
    ]


@contextlib.contextmanager
def _beside(model: Any, budget: int, sizes: Sizes) -> Iterator[list[Kvpress]]:
    """kvpress's SnapKV in its own process, where its environment is given."""
    if sizes.kvpress_python is None:
        yield []
        return
    label, policy = f"kvpress snapkv@{budget}", SnapKV(budget)
    with Kvpress(label, sizes.kvpress_python, model, policy) as theirs:
        yield [theirs]


def decode(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Time per token against transformers' caches, by length and batch."""
    model = _model(sizes.shape, device, sizes)
    common: dict[str, Any] = {
        "model": model,
        "tokens": sizes.tokens,
        "rounds": sizes.rounds,
        "bytes_per_second": copy_bandwidth(device),
    }
    everything = [full("transformers"), full("transformers-static"), *_policies(sizes.budget)]
    yield from DecodeBench(
        contenders=everything, lengths=sizes.lengths, batches=sizes.batches, **common
    ).rows()
    flat = _policies(sizes.budget)[:1]
    for row in DecodeBench(contenders=flat, lengths=sizes.flat_lengths, **common).rows():
        yield row | {"part": "flat"}


def paper_cell(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """The paper's cell: a 7B multi-head shape, 16k, batch 2, capacity 2048 (Fig. 7)."""
    model = _model(sizes.paper_shape, device, sizes)
    with _beside(model, sizes.paper_budget, sizes) as theirs:
        for row in DecodeBench(
            model=model,
            contenders=[full("transformers"), *theirs, *_policies(sizes.paper_budget)],
            lengths=[sizes.paper_length],
            batches=[2],
            tokens=sizes.tokens,
            rounds=sizes.rounds,
        ).rows():
            yield row | {"part": "paper cell"}


def appended(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """What appending in place gains, or costs, against copying what is stored for every token."""
    yield from appending.measure(
        _model(sizes.shape, device, sizes),
        cells=sizes.appended,
        prompt_tokens=sizes.lengths[0],
        tokens=sizes.tokens,
    )


def votes(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """The vote over all keys of a layer: time, and share of the copy bandwidth.

    "of_ceiling" counts the keys once, "of_bandwidth" as often as they are read.
    """
    text = _model(sizes.shape, device, sizes).config
    head_dim = text.hidden_size // text.num_attention_heads
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    length, window = sizes.prefill_length, 32
    queries = torch.randn(1, text.num_attention_heads, window, head_dim, device=device, dtype=dtype)
    keys = torch.randn(1, text.num_key_value_heads, length, head_dim, device=device, dtype=dtype)
    bandwidth = copy_bandwidth(device)
    for impl in ("reference", "blocked", *(["triton"] if device.type == "cuda" else [])):
        vote = _vote(queries, keys, impl)
        vote()
        times = [spent_on(vote).wall_ms for _ in range(10)]
        ms = spread(times, 4)
        least = 1000 * keys.nbytes / bandwidth
        yield {
            "bench": "votes",
            "impl": impl,
            "length": length,
            "ms": ms,
            "of_ceiling": round(least / ms["p50"], 4),
            "of_bandwidth": round(_KEY_READS[impl] * least / ms["p50"], 4),
        }


_KEY_READS = {"reference": 1, "blocked": 2, "triton": 2}


def _vote(queries: torch.Tensor, keys: torch.Tensor, impl: Any) -> Callable[[], Any]:
    scores = ops.ScoreOptions(scaling=queries.shape[-1] ** -0.5)
    return lambda: ops.window_votes(queries, keys, scores, group_reduce="mean", impl=impl)


def prefill(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """What compression adds to reading a prompt, in time and at the peak of memory."""
    model = _model(sizes.shape, device, sizes)
    with _beside(model, sizes.budget, sizes) as theirs:
        bench = PrefillBench(
            model=model,
            contenders=[full("transformers"), *theirs, _policies(sizes.budget)[1]],
            lengths=[sizes.prefill_length],
            rounds=sizes.rounds,
        )
        yield from bench.times()
        if device.type == "cuda":
            yield from bench.peaks()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, sizes.prefill_length), generator=generator)
    yield from measure_overhead(model, ids.to(device), SnapKV(sizes.budget), rounds=sizes.rounds)


def long_prefill(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Prompts far beyond one pass, layer by layer under a cap of memory.

    All weights are there; where the time does not suffice for all layers, the model is cut to as
    many as it does for, and the row says how many.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, sizes.memory_gb * 1e9 / total))
    model = _model(sizes.shape, device, sizes)
    decoder, every = model.get_decoder(), model.config.num_hidden_layers
    seconds_per_pair = 0.0
    for length in sizes.long_lengths:
        layers = every
        if seconds_per_pair:
            layers = min(every, int(sizes.long_seconds / (seconds_per_pair * length**2)) or 1)
        whole, model.config.num_hidden_layers = decoder.layers, layers
        decoder.layers = whole[:layers]
        bench = PrefillBench(
            model=model,
            contenders=[_policies(sizes.budget)[1]],
            lengths=[length],
            chunk_tokens=sizes.chunk_tokens,
        )
        rows: list[Row] = []
        ms = spent_on(lambda: rows.extend(bench.peaks())).wall_ms  # noqa: B023 # runs at once
        decoder.layers, model.config.num_hidden_layers = whole, every
        seconds_per_pair = ms / 1000 / layers / length**2
        for row in rows:
            yield row | {
                "part": "long prefill",
                "seconds": round(ms / 1000, 1),
                "layers_run": layers,
                "layers_held": every,
                "memory_cap_bytes": int(sizes.memory_gb * 1e9),
            }


def chunked_prefill(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """The longest prompt again, whole, with every layer held to a cap between pieces."""
    bench = PrefillBench(
        model=_model(sizes.shape, device, sizes),
        contenders=[_policies(sizes.budget)[1]],
        lengths=sizes.long_lengths[-1:],
        chunk_tokens=sizes.chunk_tokens,
        cap_tokens=sizes.cap_tokens,
    )
    rows: list[Row] = []
    ms = spent_on(lambda: rows.extend(bench.peaks())).wall_ms
    for row in rows:
        yield row | {"seconds": round(ms / 1000, 1)}


def medusa(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Figure 9 on the paper's shape: steps with and without heads, on full and small caches."""
    yield from figure_9(
        _model(sizes.paper_shape, device, sizes),
        lengths=sizes.draft_lengths,
        budget=sizes.budget,
        tokens=2 * sizes.tokens,
        rounds=sizes.rounds,
    )


PARTS: dict[str, tuple[Callable[[torch.device, Sizes], Iterator[Row]], float]] = {
    "paper cell": (paper_cell, 40),
    "votes": (votes, 20),
    "decode": (decode, 180),
    "appending": (appended, 20),
    "prefill": (prefill, 40),
    "medusa": (medusa, 60),
    "chunked prefill": (chunked_prefill, 60),
    "long prefill": (long_prefill, 180),
}
"""Every part and about how many seconds it takes on a large GPU."""


def run(names: list[str], device: torch.device, sizes: Sizes, path: Path, seconds: float) -> None:
    """Measure parts and add their rows to a file."""
    started = time.monotonic()
    block = {"environment": describe_environment(device), "budget": sizes.budget}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for name in names:
            part, needed = PARTS[name]
            left = seconds - (time.monotonic() - started)
            rows: Iterator[Row] = part(device, sizes)
            if left < needed:
                rows = iter([{"bench": name, "status": f"skipped: {left:.0f} seconds were left"}])
            for row in _or_failure(name, rows):
                line = json.dumps({"part": name} | row | block)
                print(line, file=sys.stderr)
                file.write(line + "\n")
                file.flush()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _or_failure(name: str, rows: Iterator[Row]) -> Iterator[Row]:
    """The rows, and one that says why there are no more; the parts behind it are still measured."""
    try:
        yield from rows
    except SnapKVError as error:
        yield {"bench": name, "status": f"failed: {error}"}


def _model(shape: str, device: torch.device, sizes: Sizes) -> Any:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return random_model(shape, device=device, dtype=dtype, layers=sizes.layers)


def main(arguments: list[str] | None = None) -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", action="append", choices=list(PARTS))
    parser.add_argument("--output", type=Path, default=ROWS)
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--kvpress-python", type=Path)
    given = parser.parse_args(arguments)
    if not given.small and not torch.cuda.is_available():
        parser.error("expected a CUDA device, got none; pass --small to try it on a CPU")
    device = torch.device("cpu" if given.small else "cuda")
    sizes = replace(SMALL if given.small else Sizes(), kvpress_python=given.kvpress_python)
    run(given.part or list(PARTS), device, sizes, given.output, 60 * given.minutes)


if __name__ == "__main__":
    main()
