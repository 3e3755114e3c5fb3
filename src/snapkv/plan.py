"""Memory arithmetic: what a model and its prompt take, and what would fit."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from snapkv.cache import format_bytes
from snapkv.errors import OutOfMemoryError, SnapKVError


def weights_bytes(model: Any) -> int:
    """Bytes of a model's parameters; the model may be on the meta device."""
    return sum(parameter.nbytes for parameter in model.parameters())


def cache_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Bytes that a full cache takes for every token of the prompt, all layers together."""
    text = config.get_text_config(decoder=True)
    return int(text.num_hidden_layers) * _layer_cache_bytes(text, dtype)


def prompt_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Bytes that reading a prompt takes for every token of it, with a compressed cache.

    Only one layer's keys and values are whole at a time; beside them stand the hidden states
    (the residual, its norm, attention's input and output) and the three products of the MLP. An
    estimate: eager attention takes more.
    """
    text = config.get_text_config(decoder=True)
    intermediate = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    activations = (4 * text.hidden_size + 3 * intermediate) * dtype.itemsize
    return int(activations) + _layer_cache_bytes(text, dtype)


def _layer_cache_bytes(text: Any, dtype: torch.dtype) -> int:
    query_heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or query_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // query_heads
    return 2 * int(kv_heads) * int(head_dim) * dtype.itemsize


def free_bytes(device: torch.device) -> int | None:
    """Bytes that are free on a device; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "cpu" and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


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
    per_token = prompt_bytes_per_token(model.config, model.dtype)
    fits = ""
    if available_bytes is not None:
        fits = f"; about {available_bytes // per_token:,} tokens would fit"
    return (
        f"prompt: expected {prompt_tokens:,} tokens to fit in the memory of {model.device}, got "
        f"out of memory; reading them takes about {format_bytes(per_token * prompt_tokens)} beside "
        f"weights of {format_bytes(weights_bytes(model))} (and a full cache would hold "
        f"{format_bytes(cache_bytes_per_token(model.config, model.dtype) * prompt_tokens)})"
        f"{_free(available_bytes)}{fits}; shorten the prompt, lower the budget, or choose dtype "
        "bfloat16 or a smaller model"
    )


def _free(available_bytes: int | None) -> str:
    return "" if available_bytes is None else f", and {format_bytes(available_bytes)} were free"
