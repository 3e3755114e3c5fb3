"""What compression adds to reading a prompt."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from snapkv import FullCache, SnapKV
from snapkv.policies import Policy, PromptLayer
from snapkv.storage.base import keep_tokens
from snapkv_lab.experiments.reading import read_prompt
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


@torch.no_grad()
def measure_overhead(model: Any, ids: Tensor, policy: Policy, *, rounds: int) -> Iterator[Row]:
    """One row: compressing all layers of a prompt, against reading it with transformers' cache.

    Both take turns, so that noise hits them alike.

    Args:
        model: a model of full attention only.
        ids: (1, T), the prompt.
        policy: what keeps a part of the prompt.
        rounds: turns of either that count.
    """
    layers = read_prompt(model, ids[0].tolist(), recorded_queries=policy.query_tokens).layers

    def read() -> None:
        model(ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=1)

    work: dict[str, Callable[[], float]] = {
        "reading": lambda: spent_on(read).wall_ms,
        "compressing": lambda: spent_on(lambda: _compress(layers, policy)).wall_ms,
    }
    times = alternate(work, rounds=rounds, warmup_rounds=1)
    yield {
        "benchmark": "overhead",
        "policy": policy.describe(),
        "prompt_tokens": ids.shape[1],
        "layers": len(layers),
        "rounds": rounds,
        "reading_ms": spread(times["reading"], 2),
        "compressing_ms": spread(times["compressing"], 3),
        "share": spread(ratios(times["compressing"], times["reading"]), 5),
    }


def _compress(layers: Sequence[PromptLayer], policy: Policy) -> None:
    """What every layer of a compressed cache does where the prompt ends."""
    for layer in layers:
        selection = policy.select(layer)
        if selection is not None:
            for states in (layer.keys, layer.values):
                keep_tokens(states, selection.keep_indices, selection.prompt_tokens)
