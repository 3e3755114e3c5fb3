"""What the end of a prompt costs beside reading it: the vote, the selection and the gather."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from snapkv.policies import Policy, PromptLayer
from snapkv.storage.base import keep_tokens
from snapkv_lab.experiments.reading import read_prompt
from snapkv_lab.experiments.records import Row
from snapkv_lab.measure.timing import alternate, ratios, spent_on, spread


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
