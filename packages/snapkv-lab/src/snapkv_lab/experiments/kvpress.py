"""Time beside kvpress's SnapKV: the same model, prompt and budget, each run in turn.

kvpress runs in processes of their own, which wait while another works.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from snapkv import FullCache, SnapKV
from snapkv_lab.experiments.experiment import Experiment, Given, Sized
from snapkv_lab.experiments.kvpress_process import Kvpress
from snapkv_lab.experiments.measuring import Turns
from snapkv_lab.experiments.pages import Table
from snapkv_lab.experiments.prompts import SEED, decoder, read_prompt
from snapkv_lab.experiments.records import ROOT, Row, environment_line
from snapkv_lab.measure.contenders import compressed, full

PYTHON = ROOT / ".venv-kvpress" / "bin" / "python"

_NAMES = {
    "kvpress": "kvpress, SnapKVPress",
    "kvpress full": "full cache, kvpress's transformers",
    "snapkv": "snapkv",
    "transformers": "full cache",
}
_FULL = {"kvpress": "kvpress full", "snapkv": "transformers"}
"""What a method is a part of: the full cache on the same transformers."""


def _at_once(model: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@torch.inference_mode()
def _measure(given: Given) -> Iterator[Row]:
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
                "snapkv": compressed("snapkv", policy).reader(model, prompt, _at_once),
                "transformers": full("transformers").reader(model, prompt, _at_once),
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
