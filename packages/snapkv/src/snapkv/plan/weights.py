"""How many bytes a model's weights take: those of its dtype, or as a checkpoint stores them."""

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

_PER_BLOCK, _BLOCK_BYTES = 32, 17
"""mxfp4 stores 32 numbers in four bits each and the scale of all of them in eight (OCP Microscaling
Formats, section 5)."""

_SCALE_BYTES = 4
"""A block of fp8 has a scale in float32."""


def weights_bytes(model: Any) -> int:
    """Bytes of a model's parameters; the model may be on the meta device."""
    return sum(parameter.nbytes for parameter in model.parameters())


def quantization_of(config: Any) -> str | None:
    """How a checkpoint stores its weights: "mxfp4", "fp8", "gptq", ...; None for in its dtype."""
    found = _settings(config)
    return None if found is None else str(found.get("quant_method"))


def is_counted(quantization: str | None) -> bool:
    """Whether `stored_bytes` knows what such weights take; others count in the dtype."""
    return quantization in (None, "mxfp4", "fp8")


def stored_bytes(model: Any) -> dict[str, int]:
    """Bytes of every parameter by name, as the checkpoint stores it.

    Of mxfp4 the projections of experts are quantized, as in gpt-oss; of fp8 those and the weights
    of linear layers but the output projection, as in DeepSeek-V3.

    Args:
        model: on any device, its configuration with the checkpoint's `quantization_config`.
    """
    found = _settings(model.config) or {}
    method, block = found.get("quant_method"), found.get("weight_block_size")
    head = model.get_output_embeddings()
    linear = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    sizes = {}
    for name, parameter in model.named_parameters():
        of_expert = ".experts." in name and parameter.ndim == 3
        sizes[name] = parameter.nbytes
        if method == "mxfp4" and of_expert:
            sizes[name] = math.ceil(parameter.numel() / _PER_BLOCK) * _BLOCK_BYTES
        elif method == "fp8" and (of_expert or id(parameter) in linear):
            sizes[name] = parameter.numel() + _scales(parameter.shape, block) * _SCALE_BYTES
    return sizes


def _settings(config: Any) -> dict[str, Any] | None:
    """The configuration's own word on quantization, as a dictionary."""
    found = getattr(config, "quantization_config", None)
    if found is None or isinstance(found, dict):
        return found
    settings: dict[str, Any] = found.to_dict()
    return settings


def _scales(shape: Sequence[int], block: Sequence[int] | None) -> int:
    """How many scales a weight of that shape has: one for every block, or one for a matrix."""
    *matrices, rows, columns = shape
    height, width = block or (rows, columns)
    return math.prod(matrices) * math.ceil(rows / height) * math.ceil(columns / width)
