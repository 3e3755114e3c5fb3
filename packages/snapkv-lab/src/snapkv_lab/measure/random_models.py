"""Models of published shapes with random weights, which are enough to measure speed."""

import functools
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from snapkv.errors import wrong
from snapkv.hf.device_memory import free_bytes, out_of_memory_explained
from snapkv.validation import nearest
from snapkv_app.plan.advice import weights_advice
from snapkv_app.plan.shapes import SHAPES


def random_model(
    shape: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    layers: int | None = None,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """Create a model with random weights and the given shape, in evaluation mode.

    This seeds torch's random generator with 0, so equal arguments give equal weights.

    Args:
        shape: the name of the shape, a key of `SHAPES`.
        device: where the model is made.
        dtype: the type of its weights.
        layers: the number of layers; None for that of the shape.
        attn_implementation: the attention that transformers uses; None for the default.

    Raises:
        InvalidArgumentError: the shape is not known.
        OutOfMemoryError: the weights do not fit on the device.
    """
    options: dict[str, Any] = {"attn_implementation": attn_implementation, "dtype": dtype}
    config = shape_config(shape, layers)
    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(config, **options)
    explain = functools.partial(weights_advice, bare, device, free_bytes(device))
    with out_of_memory_explained(explain), torch.device(device):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options)
    return model.eval()


def shape_config(shape: str, layers: int | None = None) -> Any:
    """Return the configuration of a model with the given shape, for transformers.

    Args:
        shape: the name of the shape, a key of `SHAPES`.
        layers: the number of layers; None for that of the shape.

    Raises:
        InvalidArgumentError: the shape is not known.
    """
    if shape not in SHAPES:
        problem = f"expected one of {', '.join(SHAPES)}, but got {shape!r}"
        raise wrong("shape", problem, nearest(shape, SHAPES, "Use one of these values"))
    changes = {} if layers is None else {"num_hidden_layers": layers}
    return AutoConfig.for_model(SHAPES[shape].family, **SHAPES[shape].config | changes)
