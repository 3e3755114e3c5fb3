"""Models of published shapes with random weights: speed does not ask for more."""

import functools
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from snapkv.plan import free_bytes, out_of_memory_explained, weights_advice
from snapkv.plan.shapes import config_of, outline


def random_model(
    shape: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    layers: int | None = None,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """A model of a published shape whose weights are random.

    Args:
        shape: a name in `snapkv.plan.shapes.SHAPES`.
        device: where the weights are made; nothing is held elsewhere meanwhile.
        dtype: of the weights.
        layers: fewer layers than the shape has, to fit a small machine; None for all.
        attn_implementation: as transformers names it; its own choice by default.

    Raises:
        InvalidArgumentError: an unknown shape.
        OutOfMemoryError: the weights do not fit.
    """
    options: dict[str, Any] = {"attn_implementation": attn_implementation, "dtype": dtype}
    bare = outline(shape, layers=layers, **options)
    explain = functools.partial(weights_advice, bare, device, free_bytes(device))
    with out_of_memory_explained(explain), torch.device(device):
        torch.manual_seed(0)
        config = config_of(shape, layers)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options)
    return model.eval()
