"""Reading prompts beyond what one forward pass can hold: layer by layer, in pieces.

A forward pass holds the hidden states of every token several times over: the products of the MLP
alone are some ten times as wide as the model. Here every decoder layer reads the prompt in pieces,
one after the other, before the next layer begins. So there is one buffer of hidden states, the
keys and values of one layer, and the intermediate results of one piece. The result is exact: every
token attends to all tokens before it, and what is kept is chosen as ever, at the prompt's end.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from snapkv.errors import UnsupportedModelError
from snapkv.hf.cache import CompressedCache
from snapkv.plan import layerwise_advice
from snapkv.prefill.out_of_memory import MemoryWatch
from snapkv.validation import require_int


@contextlib.contextmanager
def layer_by_layer(model: PreTrainedModel, *, chunk_tokens: int = 4096) -> Iterator[None]:
    """Within this block the model reads prompts in a `CompressedCache` layer by layer.

        with layer_by_layer(model):
            model.generate(ids, past_key_values=CompressedCache(model, SnapKV(1024)))

    Shorter inputs, and those without a `CompressedCache`, are read as ever. The prompt must not be
    padded where attention's mask for all of it would not fit: transformers makes none without pads.

    Args:
        model: a decoder-only transformers model.
        chunk_tokens: tokens of a piece.

    Raises:
        InvalidArgumentError: `chunk_tokens` is not positive.
        InvalidTypeError: `chunk_tokens` is not an integer.
        UnsupportedModelError: the model's layers cannot be found.
        OutOfMemoryError: from within the block; the message says what would fit. The cache has been
            emptied, the model is as it was.
    """
    require_int("chunk_tokens", chunk_tokens, minimum=1)
    layers, norms = _layers(model), _norms(model)
    if any("forward" in vars(module) for module in (*layers, *norms)):
        raise UnsupportedModelError(
            "model: expected layers with their own forward, got some that are wrapped already (an "
            "outer layer_by_layer, or a library that offloads layers); leave one of them out"
        )
    watch = MemoryWatch(model)
    for index, layer in enumerate(layers):
        read = functools.partial(_read_layer, watch, layer.forward, index, chunk_tokens)
        vars(layer)["forward"] = read
    for norm in norms:
        vars(norm)["forward"] = functools.partial(_read_norm, norm.forward, chunk_tokens)

    try:
        with watch.telling(
            lambda: layerwise_advice(model, watch.tokens, chunk_tokens, watch.available_bytes)
        ):
            yield
    finally:
        for module in (*layers, *norms):
            vars(module).pop("forward", None)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers, in order."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    found = [
        list(part)
        for part in model.get_decoder().children()
        if isinstance(part, nn.ModuleList) and len(part) == count
    ]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"model: expected a decoder with one list of {count} layers, got "
            f"{type(model).__name__} with {len(found)}; read its prompt with prefill_chunk_size"
        )
    return found[0]


def _norms(model: PreTrainedModel) -> list[nn.Module]:
    """What the decoder does to the hidden states behind its layers."""
    parts = model.get_decoder().children()
    return [part for part in parts if "Norm" in type(part).__name__]


def _read_layer(
    watch: MemoryWatch,
    forward: Callable[..., Any],
    layer_idx: int,
    chunk_tokens: int,
    hidden_states: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A layer's forward, in pieces where the input is long and goes into a compressed cache."""
    cache = kwargs.get("past_key_values")
    tokens = hidden_states.shape[1]
    if (
        not isinstance(cache, CompressedCache)
        or layer_idx not in cache.compressed_layers
        or tokens <= chunk_tokens
        or torch.is_grad_enabled()
    ):
        return forward(hidden_states, *args, **kwargs)
    _require_splittable(args, kwargs, tokens)
    watch.note(cache, tokens)
    with cache.reading.in_pieces(cache.layers[layer_idx], tokens):
        for start in range(0, tokens, chunk_tokens):
            stop = min(start + chunk_tokens, tokens)
            part = {name: _part(value, start, stop) for name, value in kwargs.items()}
            output = forward(hidden_states[:, start:stop], **part)
            hidden_states[:, start:stop] = output[0] if isinstance(output, tuple) else output
    return (hidden_states,) if isinstance(output, tuple) else hidden_states


def _read_norm(forward: Callable[..., Any], chunk_tokens: int, hidden_states: Tensor) -> Tensor:
    """A norm's forward in pieces: it holds float32 copies of its input."""
    if hidden_states.shape[1] <= chunk_tokens or torch.is_grad_enabled():
        normed: Tensor = forward(hidden_states)
        return normed
    for start in range(0, hidden_states.shape[1], chunk_tokens):
        piece = hidden_states[:, start : start + chunk_tokens]
        piece.copy_(forward(piece))
    return hidden_states


def _require_splittable(args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int) -> None:
    """Refuse arguments that are not known to belong to tokens one by one."""
    odd = [f"argument {number}" for number, _ in enumerate(args, 2)]
    odd += [name for name, value in kwargs.items() if not _is_splittable(value, tokens)]
    if odd:
        raise UnsupportedModelError(
            f"model: expected layers whose arguments belong to one token each, got {odd[0]}, which "
            "cannot be split; read the prompt with prefill_chunk_size, and with sdpa attention"
        )


def _is_splittable(value: Any, tokens: int) -> bool:
    if isinstance(value, tuple):
        return all(_is_splittable(item, tokens) for item in value)
    if isinstance(value, Tensor):
        return value.ndim >= 2 and value.shape[2 if value.ndim == 4 else 1] == tokens
    return value is None or isinstance(value, bool | int | float | str | Cache)


def _part(value: Any, start: int, stop: int) -> Any:
    """The part of an argument that belongs to tokens `start` to `stop`.

    Masks have four axes, the queries along the third; in front of the tokens' own columns stand
    those of earlier turns. (B, T) masks and position ids, and (B, T, D) position embeddings have
    the tokens along the second.
    """
    if isinstance(value, tuple):
        return tuple(_part(item, start, stop) for item in value)
    if not isinstance(value, Tensor):
        return value
    if value.ndim != 4:
        return value[:, start:stop]
    earlier = value.shape[-1] - value.shape[-2]
    return value[..., start:stop, : earlier + stop]
