"""What a prompt takes beside a loaded model's weights, and what to say when it does not fit."""

import bisect
import functools
from collections.abc import Callable
from typing import Any

import torch

from snapkv.errors import UnsupportedModelError
from snapkv.plan.footprint import Footprint, footprint_of_loaded
from snapkv.plan.weights import weights_bytes
from snapkv.storage.append_buffer import ROOM_TOKENS
from snapkv.validation import format_bytes


def prompt_bytes(model: Any, footprint: Footprint, prompt_tokens: int) -> int:
    """Bytes that reading a prompt takes beside the weights, about, with a compressed cache.

    Only one layer's keys and values are whole at a time, and windows that slide; beside them stand
    the hidden states (the residual, its norm, attention's input and output), the three products of
    the MLP, and the room that is made behind what is kept. Grows with the square of the length
    where attention is eager, see `_bytes_per_pair`.
    """
    linear = footprint.mlp_token_bytes + footprint.layer_token_bytes
    fixed = footprint.sliding_bytes(prompt_tokens) + footprint.state_bytes + _room(footprint)
    return linear * prompt_tokens + fixed + _bytes_per_pair(model) * prompt_tokens**2


def layerwise_bytes(footprint: Footprint, prompt_tokens: int, chunk_tokens: int) -> int:
    """Bytes that reading layer by layer takes beside the weights, about: `prefill.layer_by_layer`.

    The hidden states of all tokens, and twice one layer's keys and values, which grow by copying;
    of the rest what one piece needs. Layers that slide are read at once.
    """
    at_once = prompt_tokens if footprint.sliding_layers else chunk_tokens
    per_token = footprint.hidden_token_bytes + 2 * footprint.layer_token_bytes
    return (
        prompt_tokens * per_token
        + at_once * (footprint.mlp_token_bytes + footprint.layer_token_bytes)
        + footprint.sliding_bytes(prompt_tokens)
    )


def chunked_bytes(footprint: Footprint, chunk_tokens: int, cap_tokens: int) -> int:
    """Bytes that reading in pieces under a cap takes beside the weights: `prefill.chunked`.

    Layers that slide hold their window whatever the cap is.
    """
    windows = max((layer.most_tokens for layer in footprint.sliding_layers), default=0)
    held = footprint.cache_bytes(cap_tokens, windows) + _room(footprint)
    mask = chunk_tokens * (cap_tokens + chunk_tokens)  # one bool for each pair
    piece = chunk_tokens * (footprint.mlp_token_bytes + footprint.layer_token_bytes)
    return held + mask + piece


def _room(footprint: Footprint) -> int:
    """Bytes that are set aside for tokens to come, at the first one behind the prompt."""
    return footprint.token_bytes * ROOM_TOKENS


def _bytes_per_pair(model: Any) -> int:
    """Bytes for every pair of query and key: eager attention's scores and their fp32 softmax."""
    text = model.config.get_text_config(decoder=True)
    if not _is_eager(text):
        return 0
    return int(text.num_attention_heads * (model.dtype.itemsize + torch.float32.itemsize))


def _is_eager(text: Any) -> bool:
    return str(text._attn_implementation).rpartition("|")[2] == "eager"


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

    def estimate(footprint: Footprint) -> str:
        takes = functools.partial(prompt_bytes, model, footprint)
        full = footprint.cache_bytes(prompt_tokens, prompt_tokens)
        most = footprint.max_positions
        return (
            f"; reading them takes about {format_bytes(takes(prompt_tokens))} beside weights of "
            f"{format_bytes(weights_bytes(model))} (and a full cache would hold "
            f"{format_bytes(full)}){_free(available_bytes)}"
            f"{_would_fit(takes, prompt_tokens, available_bytes, most=most)}"
        )

    text = model.config.get_text_config(decoder=True)
    return (
        f"prompt: expected {prompt_tokens:,} tokens to fit in the memory of {model.device}, got "
        f"out of memory{_estimated(model, estimate)}; "
        f"{'choose sdpa attention, ' if _is_eager(text) else ''}shorten the prompt, or choose "
        f"{'dtype bfloat16 or ' if model.dtype.itemsize > 2 else ''}a smaller model"
    )


def layerwise_advice(
    model: Any, prompt_tokens: int, chunk_tokens: int, available_bytes: int | None
) -> str:
    """What to say when a prompt does not fit layer by layer."""

    def estimate(footprint: Footprint) -> str:
        takes = functools.partial(layerwise_bytes, footprint, chunk_tokens=chunk_tokens)
        return (
            f"; reading them takes about {format_bytes(takes(prompt_tokens))} beside the weights"
            f"{_free(available_bytes)}{_would_fit(takes, prompt_tokens, available_bytes)}"
        )

    return (
        f"prompt: expected {prompt_tokens:,} tokens to fit in the memory of {model.device} layer "
        f"by layer, in pieces of {chunk_tokens:,}, got out of memory{_estimated(model, estimate)}; "
        "lower chunk_tokens, or use snapkv.prefill.chunked, which takes the same for every length"
    )


def chunked_advice(
    model: Any, chunk_tokens: int, cap_tokens: int, available_bytes: int | None
) -> str:
    """What to say when reading in pieces under a cap does not fit."""

    def estimate(footprint: Footprint) -> str:
        takes = functools.partial(chunked_bytes, footprint, chunk_tokens)
        fits = _would_fit(takes, cap_tokens, available_bytes, what="a cap of about")
        needed = format_bytes(takes(cap_tokens))
        return f"; they take about {needed} beside the weights{_free(available_bytes)}{fits}"

    return (
        f"prompt: expected pieces of {chunk_tokens:,} tokens and a cap of {cap_tokens:,} to fit in "
        f"the memory of {model.device}, got out of memory{_estimated(model, estimate)}; lower "
        "cap_tokens or chunk_tokens"
    )


def _estimated(model: Any, estimate: Callable[[Footprint], str]) -> str:
    """What an estimate says; nothing of a model that does not run without its weights."""
    try:
        return estimate(footprint_of_loaded(model))
    except UnsupportedModelError:
        return ""


def _would_fit(
    takes: Callable[[int], int],
    tokens: int,
    available_bytes: int | None,
    *,
    what: str = "about",
    most: int | None = None,
) -> str:
    """How many tokens would fit, unless that contradicts what happened or the model."""
    if available_bytes is None:
        return ""
    fit = bisect.bisect_right(range(1, tokens + 1), available_bytes, key=takes)
    return f"; {what} {fit:,} tokens would fit" if 0 < fit < tokens and fit <= (most or fit) else ""


def _free(available_bytes: int | None) -> str:
    return "" if available_bytes is None else f", and {format_bytes(available_bytes)} were free"
