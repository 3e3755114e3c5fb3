"""Estimate the memory of a prompt or a model, and write the errors if it does not fit."""

import bisect
import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from snapkv.errors import OutOfMemoryError, UnsupportedModelError, wrong
from snapkv.hf import device_memory
from snapkv.hf.placement import device_of
from snapkv.ops import TokenCost
from snapkv.policies import Policy
from snapkv.storage.bits import KVCodes, Quantize
from snapkv.validation import format_bytes
from snapkv_app.plan.costs import ROOM_TOKENS, token_cost
from snapkv_app.plan.footprint import Footprint, footprint_of, is_counted
from snapkv_app.plan.shapes import SHAPES

_PER_BLOCK, _BLOCK_BYTES = 32, 17
"""mxfp4 stores 32 numbers in four bits each and their common scale in eight (OCP Microscaling
Formats, section 5)."""

_SCALE_BYTES = 4
"""A block of fp8 has a scale in float32."""

_WIDTH = torch.bfloat16.itemsize
_SHARE = 0.8
"""The fraction of the memory that the weights of a suggested model may take."""


def prompt_bytes(model: Any, footprint: Footprint, prompt_tokens: int) -> int:
    """Estimate the peak of the memory for reading one prompt into a compressed cache, in bytes.

    The weights are not included. The bytes consist of the keys and values of one full-attention
    layer, the sliding windows, the hidden states (residual, norm, input and output of attention),
    the three products of the MLP, and the append buffers. Eager attention adds its scores and their
    softmax in float32.
    """
    text = model.config.get_text_config(decoder=True)
    per_pair = text.num_attention_heads * (model.dtype.itemsize + torch.float32.itemsize)
    linear = footprint.mlp_token_bytes + footprint.layer_token_bytes
    fixed = footprint.sliding_bytes(prompt_tokens) + footprint.state_bytes
    fixed += footprint.token_bytes * ROOM_TOKENS  # append buffers of the first generated token
    pairs = prompt_tokens**2 if _is_eager(model) else 0
    return linear * prompt_tokens + fixed + int(per_pair * pairs)


def _is_eager(model: Any) -> bool:
    text = model.config.get_text_config(decoder=True)
    return str(text._attn_implementation).rpartition("|")[2] == "eager"


def weights_advice(model: Any, device: torch.device, available_bytes: int | None) -> str:
    """Write the error message for a model whose weights do not fit.

    Args:
        model: the model, which may be on the meta device.
        device: the device that is full.
        available_bytes: the memory that was free before; None if it is unknown.
    """
    return (
        f"model: its weights do not fit in the memory of {device}: they take "
        f"{format_bytes(weights_bytes(model))}{_free(available_bytes)}. Choose a smaller model, "
        "another device, or dtype bfloat16."
    )


def prompt_memory_explained(
    model: Any, prompt_tokens: int
) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that explains out-of-memory errors while a prompt is read.

    The free memory, which the message names, is measured at this call, before the block.

    Args:
        model: the model that reads the prompt.
        prompt_tokens: the number of tokens of the prompt.

    Raises:
        OutOfMemoryError: the memory was full within the block; `prompt_advice` writes the message.
    """
    free = device_memory.free_bytes(device_of(model))
    advice = functools.partial(prompt_advice, model, prompt_tokens, free)
    return device_memory.out_of_memory_explained(advice)


def prompt_advice(model: Any, prompt_tokens: int, available_bytes: int | None) -> str:
    """Write the error message for a prompt that does not fit into the memory.

    If the sizes of the model's family are unknown, the message contains no estimates.

    Args:
        model: the model.
        prompt_tokens: the number of tokens of the prompt.
        available_bytes: the memory that was free before the prompt was read; None if it is unknown.
    """

    def estimate(footprint: Footprint) -> str:
        takes = functools.partial(prompt_bytes, model, footprint)
        full = footprint.cache_bytes(prompt_tokens, prompt_tokens)
        fits = _would_fit(takes, prompt_tokens, available_bytes, footprint.max_positions)
        return (
            f": reading them takes about {format_bytes(takes(prompt_tokens))} besides the weights "
            f"of {format_bytes(weights_bytes(model))} (and a full cache would take "
            f"{format_bytes(full)}){_free(available_bytes)}{fits}"
        )

    return (
        f"prompt: {prompt_tokens:,} tokens do not fit in the memory of "
        f"{device_of(model)}{_estimated(model, estimate)}. "
        f"{'Choose sdpa attention, shorten' if _is_eager(model) else 'Shorten'} the prompt, or "
        f"choose {'dtype bfloat16 or ' if model.dtype.itemsize > 2 else ''}a smaller model."
    )


def _estimated(model: Any, estimate: Callable[[Footprint], str]) -> str:
    """Return the text of `estimate` for the model; empty if the sizes of its family are unknown."""
    try:
        return estimate(footprint_of_loaded(model))
    except UnsupportedModelError:
        return ""


def _would_fit(
    takes: Callable[[int], int],
    tokens: int,
    available_bytes: int | None,
    most: int | None = None,
) -> str:
    """Return a clause such as "; about 1,200 tokens would fit", with its semicolon.

    Empty if the free memory is unknown, or if the number is 0, is at least `tokens`, which would
    contradict the error, or is larger than `most`.

    Args:
        takes: returns the bytes for a number of tokens; must not fall with it.
        tokens: the number of tokens that do not fit.
        available_bytes: the memory that was free; None if it is unknown.
        most: the number of positions of the model; None for no limit.
    """
    if available_bytes is None:
        return ""
    fit = bisect.bisect_right(range(1, tokens + 1), available_bytes, key=takes)
    return f"; about {fit:,} tokens would fit" if 0 < fit < tokens and fit <= (most or fit) else ""


def _free(available_bytes: int | None) -> str:
    return "" if available_bytes is None else f", and {format_bytes(available_bytes)} were free"


def require_memory(name: str, outline: Any, device: torch.device) -> None:
    """Raise if the weights of a model are larger than the memory of the device.

    If the size of the weights or of the memory is unknown, nothing is raised.

    Args:
        name: the name of the model in the message.
        outline: the model on the meta device.
        device: the device for the weights.

    Raises:
        OutOfMemoryError: the weights are larger than the memory.
    """
    total = device_memory.total_bytes(device)
    needed = sum(stored_bytes(outline).values())
    if (
        total is None
        or needed <= total
        or not is_counted(_packing(outline.config).get("quant_method"))
    ):
        return
    dtype = str(outline.dtype).removeprefix("torch.")
    raise wrong(
        "model",
        f"the weights of {name} take {format_bytes(needed)} in {dtype}, which is more than the "
        f"memory of {device} ({format_bytes(total)}), so the model was not loaded",
        f"{_what_fits(outline, needed, total)}Choose a smaller model or a different device",
        OutOfMemoryError,
    )


def _what_fits(outline: Any, needed: int, total: int) -> str:
    """Write a sentence that suggests bfloat16, or the largest published model that would fit.

    A space follows the sentence. It is empty if nothing would fit. The weights of what is suggested
    take at most 80 % of the memory.

    Args:
        outline: the model on the meta device.
        needed: the bytes of its weights.
        total: the bytes of the memory.
    """
    most = int(total * _SHARE)
    if needed * _WIDTH <= most * outline.dtype.itemsize:
        return "With dtype bfloat16 they would fit. "
    fitting = [shape for shape in SHAPES.values() if shape.parameters * _WIDTH <= most]
    if not fitting:
        return ""
    largest = max(fitting, key=lambda shape: shape.parameters)
    takes = format_bytes(largest.parameters * _WIDTH)
    return f"{largest.repository} would fit, with {takes} in bfloat16. "


def footprint_of_loaded(model: Any) -> Footprint:
    """Compute the footprint of a loaded model in its dtype.

    Raises:
        UnsupportedModelError: the sizes of its family are not known, see `footprint_of`.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    return footprint_of(model.config.to_dict(), dtype=dtype)


def token_costs(
    model: PreTrainedModel, policy: Policy, quantize: Quantize | None
) -> list[TokenCost]:
    """Return the bytes of a stored token in every full-attention layer of a model, in order.

    They are of all heads together, and in the quantized form if `quantize` is not None. If `policy`
    keeps tokens per query head, the bytes count for every query head. Empty if the sizes of the
    model's family are unknown.

    Raises:
        InvalidArgumentError: `quantize` is not a known name.
    """
    try:
        footprint = footprint_of_loaded(model)
    except UnsupportedModelError:
        return []
    bits = None if quantize is None else KVCodes.of(quantize)
    queries = model.config.get_text_config(decoder=True).num_attention_heads
    found = []
    for layer in footprint.full_layers:
        cost = token_cost(layer, bits)
        times = queries // layer.heads if policy.per_query_head else 1
        found.append(replace(cost, block_bytes=times * cost.block_bytes))
    return found


def weights_bytes(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def stored_bytes(model: Any) -> dict[str, int]:
    """Return the bytes that the checkpoint stores for every parameter, by its name.

    mxfp4 quantizes the projections of experts, as in gpt-oss. fp8 also quantizes all linear layers
    except the output projection, as in DeepSeek-V3. With any other quantization, or none, the
    bytes are those in the dtype of the model.
    """
    found = _packing(model.config)
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


def _packing(config: Any) -> dict[str, Any]:
    """Return the quantization settings of a model's configuration; empty if it has none."""
    found = getattr(config, "quantization_config", None) or {}
    if isinstance(found, dict):
        return found
    settings: dict[str, Any] = found.to_dict()
    return settings


def _scales(shape: Sequence[int], block: Sequence[int] | None) -> int:
    """Return the number of scales of a weight: one per block, or one per matrix without blocks.

    Args:
        shape: the shape of the weight. The last two axes are a matrix, and the others count
            matrices.
        block: the rows and columns of a block. Blocks at the edges of a matrix may be smaller.
    """
    *matrices, rows, columns = shape
    height, width = block or (rows, columns)
    return math.prod(matrices) * math.ceil(rows / height) * math.ceil(columns / width)
