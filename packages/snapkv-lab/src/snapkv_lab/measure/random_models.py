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
    options: dict[str, Any] = {"attn_implementation": attn_implementation, "dtype": dtype}
    bare = outline(shape, layers=layers, **options)
    explain = functools.partial(weights_advice, bare, device, free_bytes(device))
    with out_of_memory_explained(explain), torch.device(device):
        torch.manual_seed(0)
        config = config_of(shape, layers)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options)
    return model.eval()
