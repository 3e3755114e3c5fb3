"""Memory arithmetic: what a model and its prompt take, and what would fit."""

import contextlib
import errno
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from snapkv.cache import format_bytes
from snapkv.errors import OutOfMemoryError, SnapKVError


def weights_bytes(model: Any) -> int:
    """Bytes of a model's parameters; the model may be on the meta device."""
    return sum(parameter.nbytes for parameter in model.parameters())


def cache_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Bytes that a full cache takes for every token of the prompt, all layers together."""
    text = config.get_text_config(decoder=True)
    return int(text.num_hidden_layers) * _layer_cache_bytes(text, dtype)


def full_cache_bytes(config: Any, dtype: torch.dtype, tokens: int) -> int:
    """Bytes of a full cache of that many tokens; layers with a sliding window hold the last."""
    text = config.get_text_config(decoder=True)
    stored = 0
    for layer in DynamicCache(config=text).layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            stored += min(tokens, layer.sliding_window - 1)
        elif isinstance(layer, DynamicLayer):
            stored += tokens
    return stored * _layer_cache_bytes(text, dtype)


def prompt_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Bytes that reading a prompt takes for every token of it, with a compressed cache.

    Only one layer's keys and values are whole at a time; beside them stand the hidden states
    (the residual, its norm, attention's input and output) and the three products of the MLP. An
    estimate; what eager attention takes besides is in `prompt_bytes`.
    """
    text = config.get_text_config(decoder=True)
    intermediate = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    activations = (4 * text.hidden_size + 3 * intermediate) * dtype.itemsize
    return int(activations) + _layer_cache_bytes(text, dtype)


def layerwise_bytes(model: Any, prompt_tokens: int, chunk_tokens: int) -> int:
    """Bytes that reading layer by layer takes beside the weights, about: `prefill.layer_by_layer`.

    The hidden states of all tokens, and twice one layer's keys and values, which grow by copying;
    of the rest what one piece needs.
    """
    text = model.config.get_text_config(decoder=True)
    per_token = int(text.hidden_size) * model.dtype.itemsize + 2 * _layer_cache_bytes(
        text, model.dtype
    )
    return prompt_tokens * int(per_token) + _piece_bytes(model, chunk_tokens)


def chunked_bytes(model: Any, chunk_tokens: int, cap_tokens: int) -> int:
    """Bytes that reading in pieces under a cap takes beside the weights: `prefill.chunked`."""
    held = cap_tokens * cache_bytes_per_token(model.config, model.dtype)
    mask = chunk_tokens * (cap_tokens + chunk_tokens)  # one bool for each pair
    return held + mask + _piece_bytes(model, chunk_tokens)


def _piece_bytes(model: Any, chunk_tokens: int) -> int:
    return chunk_tokens * prompt_bytes_per_token(model.config, model.dtype)


def prompt_bytes(model: Any, prompt_tokens: int) -> int:
    """Bytes that reading a prompt takes beside the weights, about.

    Grows with the square of the length where attention is eager, see `_bytes_per_pair`.
    """
    linear = prompt_bytes_per_token(model.config, model.dtype) * prompt_tokens
    return linear + _bytes_per_pair(model) * prompt_tokens**2


def _bytes_per_pair(model: Any) -> int:
    """Bytes for every pair of query and key: eager attention's scores and their fp32 softmax."""
    text = model.config.get_text_config(decoder=True)
    if not _is_eager(text):
        return 0
    return int(text.num_attention_heads * (model.dtype.itemsize + torch.float32.itemsize))


def _is_eager(text: Any) -> bool:
    return str(text._attn_implementation).rpartition("|")[2] == "eager"


def _longest_prompt(model: Any, available_bytes: int) -> int:
    """The most tokens whose `prompt_bytes` are available."""
    linear = prompt_bytes_per_token(model.config, model.dtype)
    square = _bytes_per_pair(model)
    # The root of square * T^2 + linear * T = available, in the form that allows for square = 0.
    root = math.isqrt(linear**2 + 4 * square * available_bytes)
    return 2 * available_bytes // (linear + root)


def _layer_cache_bytes(text: Any, dtype: torch.dtype) -> int:
    query_heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or query_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // query_heads
    return 2 * int(kv_heads) * int(head_dim) * dtype.itemsize


def free_bytes(device: torch.device) -> int | None:
    """Bytes that are free on a device; None where the system does not say.

    On the CPU no more than what a limit on the address space (``ulimit -v``) leaves.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    known = [count for count in (_free_memory_bytes(), _free_address_bytes()) if count is not None]
    return min(known, default=None)


def _free_memory_bytes() -> int | None:
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_address_bytes() -> int | None:
    """What a limit on this process's address space leaves; None without one."""
    try:
        import resource  # not on Windows

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return None
    if limit == resource.RLIM_INFINITY:
        return None
    return max(0, limit - pages * resource.getpagesize())


@contextlib.contextmanager
def out_of_memory_explained(explain: Callable[[], str]) -> Iterator[None]:
    """Turn the ways in which torch and the system run out of memory into one error.

    Raises:
        OutOfMemoryError: with the message that `explain` gives.
    """
    try:
        yield
    except SnapKVError:
        raise
    except (MemoryError, OSError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise OutOfMemoryError(explain()) from error


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return "DefaultCPUAllocator" in str(error)


def weights_advice(model: Any, device: torch.device, available_bytes: int | None) -> str:
    """What to say when the weights do not fit.

    Args:
        model: the model, or its outline on the meta device.
        device: where its weights should have gone.
        available_bytes: what was free before, None where it is not known.
    """
    return (
        f"model: expected its weights to fit in the memory of {device}, got out of memory; they "
        f"take {format_bytes(weights_bytes(model))}{_free(available_bytes)}; choose a smaller "
        "model, another device, or dtype bfloat16"
    )


def prompt_advice(model: Any, prompt_tokens: int, available_bytes: int | None) -> str:
    """What to say when reading a prompt does not fit beside the weights.

    Args:
        model: the model that ran out of memory.
        prompt_tokens: length of the prompt.
        available_bytes: what was free before the prompt was read, None where it is not known.
    """
    text = model.config.get_text_config(decoder=True)
    full = full_cache_bytes(model.config, model.dtype, prompt_tokens)
    return (
        f"prompt: expected {prompt_tokens:,} tokens to fit in the memory of {model.device}, got "
        f"out of memory; reading them takes about "
        f"{format_bytes(prompt_bytes(model, prompt_tokens))} beside weights of "
        f"{format_bytes(weights_bytes(model))} (and a full cache would hold {format_bytes(full)})"
        f"{_free(available_bytes)}{_fits(model, prompt_tokens, available_bytes)}; "
        f"{'choose sdpa attention, ' if _is_eager(text) else ''}shorten the prompt, or choose "
        f"{'dtype bfloat16 or ' if model.dtype.itemsize > 2 else ''}a smaller model"
    )


def layerwise_advice(
    model: Any, prompt_tokens: int, chunk_tokens: int, available_bytes: int | None
) -> str:
    """What to say when a prompt does not fit layer by layer."""
    needed = layerwise_bytes(model, prompt_tokens, chunk_tokens)
    fits = ""
    if available_bytes is not None:
        fixed = layerwise_bytes(model, 0, chunk_tokens)
        tokens = (available_bytes - fixed) * prompt_tokens // (needed - fixed)
        fits = f"; about {tokens:,} tokens would fit" if 0 < tokens < prompt_tokens else ""
    return (
        f"prompt: expected {prompt_tokens:,} tokens to fit in the memory of {model.device} layer "
        f"by layer, in pieces of {chunk_tokens:,}, got out of memory; reading them takes about "
        f"{format_bytes(needed)} beside the weights{_free(available_bytes)}{fits}; lower "
        "chunk_tokens, or use snapkv.prefill.chunked, which takes the same for every length"
    )


def chunked_advice(
    model: Any, chunk_tokens: int, cap_tokens: int, available_bytes: int | None
) -> str:
    """What to say when reading in pieces under a cap does not fit."""
    fits = ""
    if available_bytes is not None:
        fixed = chunked_bytes(model, chunk_tokens, 0)
        per_token = chunked_bytes(model, chunk_tokens, 1) - fixed
        tokens = (available_bytes - fixed) // per_token
        fits = f"; a cap of about {tokens:,} tokens would fit" if 0 < tokens < cap_tokens else ""
    return (
        f"prompt: expected pieces of {chunk_tokens:,} tokens and a cap of {cap_tokens:,} to fit in "
        f"the memory of {model.device}, got out of memory; they take about "
        f"{format_bytes(chunked_bytes(model, chunk_tokens, cap_tokens))} beside the weights"
        f"{_free(available_bytes)}{fits}; lower cap_tokens or chunk_tokens"
    )


def max_positions(model: Any) -> int | None:
    """Positions the model has for prompt and answer together; None where there is no limit."""
    text = model.config.get_text_config(decoder=True)
    positions: int | None = getattr(text, "max_position_embeddings", None)
    return positions


def _fits(model: Any, prompt_tokens: int, available_bytes: int | None) -> str:
    """How many tokens would fit, unless the estimate contradicts what happened or the model."""
    if available_bytes is None:
        return ""
    tokens = _longest_prompt(model, available_bytes)
    if not 0 < tokens < prompt_tokens or tokens > (max_positions(model) or tokens):
        return ""
    return f"; about {tokens:,} tokens would fit"


def _free(available_bytes: int | None) -> str:
    return "" if available_bytes is None else f", and {format_bytes(available_bytes)} were free"
