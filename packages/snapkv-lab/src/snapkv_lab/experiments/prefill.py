"""What compression adds to reading a prompt."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from snapkv import FullCache, SnapKV
from snapkv_lab.experiments.records import Row
from snapkv_lab.measure.contenders import Contender, compressed, full
from snapkv_lab.measure.timing import Spent, alternate, ratios, spent_on, spread

PROMPT_TOKENS = 4096
BUDGET = 512
ROUNDS = 11

CONTENDERS = {
    each.label: each
    for each in (
        full("transformers"),
        compressed("full", FullCache()),
        compressed("snapkv", SnapKV(BUDGET)),
    )
}
"""transformers' own cache and attention; every token kept through snapkv; compressed."""


@torch.inference_mode()
def measure_prefill(model: Any, prompt_ids: list[int]) -> Iterator[Row]:
    """Rows of times, then rows of ratios of pairs."""
    ids = torch.tensor([prompt_ids], device=model.device)
    times = alternate(
        {name: reader(model, ids, each) for name, each in CONTENDERS.items()},
        rounds=ROUNDS,
        warmup_rounds=1,
    )
    settings = {"benchmark": "prefill", "prompt_tokens": len(prompt_ids), "budget": BUDGET}
    for name, runs in times.items():
        yield {
            **settings,
            "cache": name,
            "ms": spread(_wall(runs), 1),
            "cpu_ms": spread(_cpu(runs), 1),
            "samples_ms": [round(ms, 1) for ms in _wall(runs)],
            "samples_cpu_ms": [round(ms, 1) for ms in _cpu(runs)],
        }
    for name, base in (("snapkv", "full"), ("snapkv", "transformers"), ("full", "transformers")):
        yield {
            **settings,
            "cache": name,
            "against": base,
            "pairs": ROUNDS,
            "ratio": spread(ratios(_wall(times[name]), _wall(times[base])), 4),
            "cpu_ratio": spread(ratios(_cpu(times[name]), _cpu(times[base])), 4),
        }


def _wall(runs: list[Spent]) -> list[float]:
    return [run.wall_ms for run in runs]


def _cpu(runs: list[Spent]) -> list[float]:
    return [run.cpu_ms for run in runs]


def reader(model: Any, ids: Tensor, contender: Contender) -> Callable[[], Spent]:
    """A function that reads the prompt into a new cache and says what that took."""

    def read() -> Spent:
        with contender.at_work(model):
            cache = contender.make(model, ids.shape[1])
            return spent_on(lambda: model(ids, past_key_values=cache, logits_to_keep=1))

    return read
