"""Time beside kvpress's SnapKV: the same model, prompt and budget, each run in turn.

    python -m snapkv_lab.experiments kvpress --bench decode --shape llama-3.1-8b --lengths 4096
        a bench of `snapkv bench` with kvpress in it; rows as JSON

kvpress runs in processes of their own, which wait while another works.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snapkv import FullCache, SnapKV
from snapkv_lab.experiments.decode import decoder
from snapkv_lab.experiments.experiment import Experiment, Given, Shown, table
from snapkv_lab.experiments.kvpress_process import Kvpress
from snapkv_lab.experiments.magic_number import SEED, prompt_of
from snapkv_lab.experiments.peak_memory import HAND_BACK_FREED_MEMORY
from snapkv_lab.experiments.prefill import reader
from snapkv_lab.experiments.reading import ReadPrompt, read_prompt
from snapkv_lab.experiments.records import (
    Row,
    environment_line,
)
from snapkv_lab.measure.contenders import Contender, compressed, full
from snapkv_lab.measure.decode import DecodeBench, ThroughputBench, copy_bandwidth
from snapkv_lab.measure.prefill import PrefillBench
from snapkv_lab.measure.random_models import random_model
from snapkv_lab.measure.timing import alternate, ratios, spread

PYTHON = Path(__file__).parents[5] / ".venv-kvpress" / "bin" / "python"

POLICY = SnapKV(512, window_size=32, kernel_size=7, pooling="avg")
"""kvpress pools with averages."""

LENGTHS = (1024, 4096)
PREFILL_ROUNDS, DECODE_ROUNDS = 8, 48
_NAMES = {
    "kvpress": "kvpress, SnapKVPress",
    "kvpress full": "full cache, kvpress's transformers",
    "snapkv": "snapkv",
    "transformers": "full cache",
}
_FULL = {"kvpress": "kvpress full", "snapkv": "transformers"}
"""What a method is a part of: the full cache on the same transformers."""


@torch.inference_mode()
def measure(
    model: Any,
    prompts: dict[int, list[int]],
    *,
    prefill_rounds: int = PREFILL_ROUNDS,
    decode_rounds: int = DECODE_ROUNDS,
) -> Iterator[Row]:
    """Rows per length and cache: reading the prompt, then decoding behind it.

    Args:
        model: a model of full attention.
        prompts: token ids by length.
        prefill_rounds: turns of every cache that count.
        decode_rounds: tokens of every cache that count.
    """
    with (
        Kvpress("kvpress", PYTHON, model, POLICY, weights=True) as theirs,
        Kvpress("kvpress full", PYTHON, model, None, weights=True) as theirs_full,
    ):
        for length, ids in prompts.items():
            prompt = torch.tensor([ids])
            theirs.read(prompt)
            peer = theirs.versions | {"kept_tokens": theirs.kept_tokens}
            named = {"prompt_tokens": length, "policy": POLICY.describe(), "peer": peer}
            read = {
                "kvpress": partial(theirs.read, prompt),
                "kvpress full": partial(theirs_full.read, prompt),
                **_readers(model, prompt),
            }
            yield from _rows("prefill", read, prefill_rounds, named)
            steps = {
                "kvpress": partial(theirs, 1),
                "kvpress full": partial(theirs_full, 1),
                **_decoders(read_prompt(model, ids)),
            }
            yield from _rows("decode", steps, decode_rounds, named)


def _readers(model: Any, prompt: Tensor) -> dict[str, Callable[[], float]]:
    contenders = compressed("snapkv", POLICY), full("transformers")

    def timed(contender: Contender) -> Callable[[], float]:
        read = reader(model, prompt, contender)
        return lambda: read().wall_ms

    return {each.label: timed(each) for each in contenders}


def _decoders(prompt: ReadPrompt) -> dict[str, Callable[[], float]]:
    return {
        "snapkv": decoder(prompt, prompt.compressed(POLICY)),
        "transformers": decoder(prompt, prompt.compressed(FullCache())),
    }


def _rows(
    benchmark: str, work: dict[str, Callable[[], float]], rounds: int, named: Row
) -> Iterator[Row]:
    times = alternate(work, rounds=rounds, warmup_rounds=1)
    for name, samples in times.items():
        yield {
            "benchmark": benchmark,
            "cache": name,
            **named,
            "rounds": rounds,
            "ms": spread(samples, 2),
            "against_kvpress": spread(ratios(samples, times["kvpress"]), 4),
            "against_full": spread(ratios(samples, times[_FULL.get(name, name)]), 4),
        }


def _measured(given: Given) -> Iterator[Row]:
    if not PYTHON.is_file():
        sys.exit(f"expected kvpress's environment, got no {PYTHON}; run make kvpress")
    prompts = {length: prompt_of(given.loaded, length) for length in LENGTHS}
    return (row | {"seed": SEED} for row in measure(given.loaded.model, prompts))


def _line(rows: list[Row]) -> str:
    return (
        f"{environment_line(rows)}; "
        "kvpress {kvpress} on transformers {transformers}".format_map(rows[0]["peer"])
    )


EXPERIMENT = Experiment(
    name="kvpress",
    title="Beside kvpress",
    takes="about nine minutes",
    measure=_measured,
    measured=_line,
    tables=lambda rows: [
        table(
            rows,
            {
                "work": "{benchmark}",
                "cache": lambda row: _NAMES[row["cache"]],
                "prompt tokens": "{prompt_tokens:,}",
                "ms": "{ms[p50]:,.1f}",
                "against kvpress": "{against_kvpress[p50]:.3f}",
                "against its full cache": "{against_full[p50]:.3f}",
            },
        )
    ],
    shown={
        "kvpress": Shown(
            "Beside kvpress",
            ("work", "prompt tokens", "ms", "against kvpress", "against its full cache"),
            ("prefill | snapkv | 4,096", "decode | snapkv | 4,096"),
        )
    },
)


def bench(given: argparse.Namespace) -> Iterator[Row]:
    """Rows of a bench on random weights: transformers' cache, kvpress and snapkv, by budget.

    The weights of every kvpress must fit beside the model's, and do not count as `--memory-gb`. It
    decodes in the loop of its pipeline, which does less around a token than `model.generate`.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    model = random_model(given.shape, device=device, dtype=dtype, layers=given.layers)
    policies = {f"snapkv@{budget}": SnapKV(budget) for budget in given.budget}
    with contextlib.ExitStack() as running:
        theirs = {
            f"kvpress {label}": running.enter_context(
                Kvpress(f"kvpress {label}", given.python, model, policy)
            )
            for label, policy in policies.items()
        }
        ours = [compressed(f"{label} dynamic", policy) for label, policy in policies.items()]
        contenders = [full("transformers"), *theirs.values(), *ours]
        if given.bench == "memory" and not cuda:
            os.environ.update(HAND_BACK_FREED_MEMORY)  # before its processes start
            contenders = list(theirs.values())  # the others need processes of their own as well
        for row in _bench_rows(given, model, contenders):
            peer = theirs.get(row["cache"])
            yield row | ({} if peer is None else {"kvpress": peer.versions})


def _bench_rows(given: argparse.Namespace, model: Any, contenders: list[Any]) -> Iterator[Row]:
    common = {"model": model, "contenders": contenders, "lengths": given.lengths}
    common["rounds"] = given.rounds
    match given.bench:
        case "decode":
            bandwidth = copy_bandwidth(model.device)
            return DecodeBench(**common, batches=given.batch, bytes_per_second=bandwidth).rows()
        case "prefill":
            return PrefillBench(**common, batches=given.batch).times()
        case "memory":
            return PrefillBench(**common, batches=given.batch).peaks()
        case _:
            return ThroughputBench(**common, memory_bytes=int(given.memory_gb * 1e9)).rows()


def main(arguments: list[str] | None = None) -> None:
    """Measure and render the page, or run one bench."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--bench" not in arguments:
        EXPERIMENT.main(arguments)
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bench", choices=["decode", "prefill", "memory", "throughput"])
    parser.add_argument("--python", type=Path, default=PYTHON, help="of kvpress's environment")
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--budget", type=int, nargs="+", default=[1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-gb", type=float, default=16.0, help="for throughput")
    for row in bench(parser.parse_args(arguments)):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
