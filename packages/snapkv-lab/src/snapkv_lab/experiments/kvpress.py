"""Time beside kvpress's SnapKV: the same model, prompt and budget, each run in turn.

kvpress runs in processes of their own, which wait while another works. `kvpress_bench` has it
among the contenders of `snapkv bench`, on random weights, and prints its rows.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from snapkv import FullCache, SnapKV
from snapkv_lab.experiments.experiment import Experiment, Given, Sized
from snapkv_lab.experiments.kvpress_process import Kvpress
from snapkv_lab.experiments.measuring import FREED_MEMORY_HANDED_BACK, Turns
from snapkv_lab.experiments.pages import Table
from snapkv_lab.experiments.prompts import SEED, decoder, read_prompt
from snapkv_lab.experiments.records import ROOT, Row, environment_line
from snapkv_lab.experiments.speed import reader
from snapkv_lab.measure.bandwidth import copy_bandwidth
from snapkv_lab.measure.contenders import compressed, full
from snapkv_lab.measure.decode import DecodeBench
from snapkv_lab.measure.prefill import PrefillBench
from snapkv_lab.measure.random_models import random_model
from snapkv_lab.measure.throughput import ThroughputBench

PYTHON = ROOT / ".venv-kvpress" / "bin" / "python"

_NAMES = {
    "kvpress": "kvpress, SnapKVPress",
    "kvpress full": "full cache, kvpress's transformers",
    "snapkv": "snapkv",
    "transformers": "full cache",
}
_FULL = {"kvpress": "kvpress full", "snapkv": "transformers"}
"""What a method is a part of: the full cache on the same transformers."""


@torch.inference_mode()
def _measure(given: Given) -> Iterator[Row]:
    """Rows per length and cache: reading the prompt, then decoding behind it."""
    model, python = given.loaded.model, given.python
    policy = SnapKV(given.budget, window_size=32, kernel_size=7, pooling="avg")  # as kvpress pools
    with (
        Kvpress("kvpress", python, model, policy, weights=True) as theirs,
        Kvpress("kvpress full", python, model, None, weights=True) as theirs_full,
    ):
        for length in given.lengths:
            ids = given.prompt(length)
            prompt = torch.tensor([ids])
            theirs.read(prompt)
            peer = theirs.versions | {"kept_tokens": theirs.last["kept_tokens"]}
            named = {"prompt_tokens": length, "policy": policy.describe(), "peer": peer}
            read = {
                "kvpress": partial(theirs.read, prompt),
                "kvpress full": partial(theirs_full.read, prompt),
                "snapkv": reader(model, prompt, compressed("snapkv", policy)),
                "transformers": reader(model, prompt, full("transformers")),
            }
            yield from _rows("prefill", read, given.prefill_rounds, named)
            whole = read_prompt(model, ids)
            steps = {
                "kvpress": theirs,
                "kvpress full": theirs_full,
                "snapkv": decoder(whole, whole.compressed(policy)),
                "transformers": decoder(whole, whole.compressed(FullCache())),
            }
            yield from _rows("decode", steps, given.decode_rounds, named)


def _rows(
    benchmark: str, work: dict[str, Callable[[], Any]], rounds: int, named: Row
) -> Iterator[Row]:
    turns = Turns(work, rounds=rounds)
    for name in turns:
        yield {
            "benchmark": benchmark,
            "cache": name,
            **named,
            "rounds": rounds,
            "ms": turns.ms(name, 2),
            "against_kvpress": turns.ratio(name, "kvpress"),
            "against_full": turns.ratio(name, _FULL.get(name, name)),
        }


def _line(rows: list[Row]) -> str:
    peer = "kvpress {kvpress} on transformers {transformers}".format_map(rows[0]["peer"])
    return f"{environment_line(rows)}; {peer}"


KVPRESS = Experiment(
    name="kvpress",
    title="Beside kvpress",
    takes="about nine minutes",
    measure=_measure,
    options={
        "python": str(PYTHON),
        "budget": Sized(512, 64),
        "lengths": Sized((1024, 4096), (200,)),
        "prefill_rounds": Sized(8, 2),
        "decode_rounds": Sized(48, 3),
    },
    fields={"seed": SEED},
    measured=_line,
    tables=[
        Table(
            {
                "work": "{benchmark}",
                "cache": lambda row: _NAMES[row["cache"]],
                "prompt tokens": "{prompt_tokens:,}",
                "ms": "{ms[p50]:,.1f}",
                "against kvpress": "{against_kvpress[p50]:.3f}",
                "against its full cache": "{against_full[p50]:.3f}",
            }
        )
    ],
)


def _benches(given: Given) -> Iterator[Row]:
    """Rows of a bench: transformers' cache, kvpress and snapkv, by budget.

    The weights of every kvpress must fit beside the model's, and do not count as `--memory-gb`. It
    decodes in the loop of its pipeline, which does less around a token than `model.generate`.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    model = random_model(given.shape, device=device, dtype=dtype, layers=given.layers or None)
    policies = {f"snapkv@{budget}": SnapKV(budget) for budget in given.budgets}
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
            os.environ.update(FREED_MEMORY_HANDED_BACK)  # before its processes start
            contenders = list(theirs.values())  # the others need processes of their own as well
        for row in _bench_rows(given, {"model": model, "contenders": contenders}):
            peer = theirs.get(row["cache"])
            yield row | ({} if peer is None else {"kvpress": peer.versions})


def _bench_rows(given: Given, common: dict[str, Any]) -> Iterator[Row]:
    common |= {"lengths": given.lengths, "rounds": given.rounds}
    match given.bench:
        case "decode":
            bandwidth = copy_bandwidth(common["model"].device)
            return DecodeBench(**common, batches=given.batch, bytes_per_second=bandwidth).rows()
        case "prefill":
            return PrefillBench(**common, batches=given.batch).times()
        case "memory":
            return PrefillBench(**common, batches=given.batch).peaks()
        case "throughput":
            return ThroughputBench(**common, memory_bytes=int(given.memory_gb * 1e9)).rows()
    raise ValueError(f"expected decode, prefill, memory or throughput, got {given.bench}")


BENCHES = Experiment(
    name="kvpress_bench",
    title="kvpress among the contenders of `snapkv bench`, on random weights",
    measure=_benches,
    described=lambda given: {},
    appends=True,
    options={
        "bench": "decode",
        "output": "",
        "python": str(PYTHON),
        "shape": "smollm2-135m",
        "layers": 0,
        "lengths": (1024, 4096),
        "batch": (1,),
        "budgets": (1024,),
        "rounds": 5,
        "memory_gb": 16.0,
    },
)
