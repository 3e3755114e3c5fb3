"""Reading a prompt layer by layer and in pieces, if it does not fit into one forward pass.

Every decoder layer reads the whole prompt, one piece after the other, before the next layer begins.
So memory holds one buffer of hidden states, the keys and values of one layer, and the intermediate
results of one piece. The result is exact: every token attends to all tokens before it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from snapkv.errors import wrong
from snapkv.hf import forward_context
from snapkv.hf.cache import CompressedCache
from snapkv.hf.cache_argument import cache_among
from snapkv.hf.placement import device_of
from snapkv.prefill.decoder import (
    MemoryWatch,
    decoder_layers,
    part_of,
    replacing_forward,
    require_by_token,
    tokens_of,
)
from snapkv.validation import format_bytes, require_int


@contextlib.contextmanager
def layer_by_layer(model: PreTrainedModel, *, chunk_tokens: int = 4096) -> Iterator[None]:
    """Let the model read long prompts into a `CompressedCache` layer by layer within this block.

        with layer_by_layer(model):
            model.generate(ids, past_key_values=CompressedCache(model, SnapKV(1024)))

    Inputs of up to `chunk_tokens` tokens, inputs without a `CompressedCache`, and inputs for which
    gradients are computed are read as usual. A prompt with padding can only be read if the
    attention mask for all of it fits into memory; without padding, transformers makes no mask. A
    layer overwrites the states that it gets, including states that a hook has stored.

    Args:
        model: a decoder-only transformers model, which is changed in place within the block.
        chunk_tokens: how many tokens a piece has.

    Raises:
        UnsupportedModelError: the model's layers cannot be found, or are already wrapped. Within
            the block: an argument of a layer cannot be split.
        InvalidTypeError: `chunk_tokens` is not an integer.
        InvalidArgumentError: `chunk_tokens` is below 1. Within the block: hidden states, attention
            weights or router logits of a prompt are requested, or the policy looks at token ids.
        OutOfMemoryError: within the block: the prompt does not fit into memory. The cache is empty
            then, and the model is unchanged.
    """
    chunk_tokens = require_int("chunk_tokens", chunk_tokens, minimum=1)
    watch = MemoryWatch(model)
    forwards: dict[nn.Module, Callable[..., Any]] = {
        layer: functools.partial(_read_layer, watch, layer.forward, index, chunk_tokens)
        for index, layer in enumerate(decoder_layers(model))
    }
    decoder = model.get_decoder()
    forwards[decoder] = functools.partial(_read, decoder.forward, decoder.config, chunk_tokens)
    for part in decoder.children():
        if "Norm" in type(part).__name__:  # the norm after the layers
            forwards[part] = functools.partial(_read_norm, part.forward, chunk_tokens)

    def advice() -> str:
        free = watch.available_bytes
        were_free = "" if free is None else f", of which {format_bytes(free)} were free"
        return (
            f"prompt: {watch.tokens:,} tokens do not fit in the memory of {device_of(model)}"
            f"{were_free}, though they are read layer by layer in pieces of {chunk_tokens:,}. Pass "
            f"chunk_tokens={max(1, chunk_tokens // 2)} to layer_by_layer, or shorten the prompt"
        )

    with replacing_forward(forwards), watch.explaining(advice):
        yield


def _read(
    forward: Callable[..., Any], config: Any, chunk_tokens: int, *args: Any, **kwargs: Any
) -> Any:
    """Run the decoder, on a copy of the embeddings if the layers are going to overwrite them.

    Args:
        forward: the decoder's own `forward`.
        config: the decoder's configuration.
        chunk_tokens: how many tokens are read at once.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.

    Raises:
        InvalidArgumentError: the layers will read in pieces, but the call or the configuration
            requests hidden states, attention weights or router logits, which need all tokens of a
            layer at once.
    """
    if _comes_in_pieces(cache_among(kwargs), tokens_of(args, kwargs), chunk_tokens):
        for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
            if value := kwargs.get(name, getattr(config, name, False)):
                problem = f"the prompt is read layer by layer, which excludes this, but got {value}"
                raise wrong(name, problem, "Remove this argument")
        if (embeddings := kwargs.get("inputs_embeds")) is not None:
            kwargs["inputs_embeds"] = embeddings.clone()
    return forward(*args, **kwargs)


def _comes_in_pieces(cache: Any, tokens: int, chunk_tokens: int) -> bool:
    """Return whether an input of `tokens` tokens is read into this cache in pieces."""
    is_long = isinstance(cache, CompressedCache) and tokens > chunk_tokens
    return is_long and not torch.is_grad_enabled()


def _read_layer(
    watch: MemoryWatch,
    forward: Callable[..., Any],
    layer_idx: int,
    chunk_tokens: int,
    hidden_states: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a decoder layer, in pieces if the input is long and is read into a compressed cache.

    If it runs in pieces, the outputs overwrite `hidden_states` in place. A layer that is not
    compressed reads the whole input at once, and so does every layer where gradients are computed
    or each token sees its own branch.

    Returns:
        What the layer's own `forward` returns: the hidden states, or a tuple that begins with them.
        If it ran in pieces, they are `hidden_states` itself, and the tuple has no further entries.

    Raises:
        InvalidArgumentError: the policy needs token ids.
        UnsupportedModelError: an argument of the layer cannot be split into pieces.
        InvalidArgumentError: the policy looks at token ids.
        CacheMismatchError: the prompt was not announced, and may contain draft tokens.
    """
    cache = cache_among(kwargs)
    tokens = hidden_states.shape[1]
    if not _comes_in_pieces(cache, tokens, chunk_tokens):
        return forward(hidden_states, *args, **kwargs)
    if forward_context.current.branches is not None:  # each token sees its own branch
        return forward(hidden_states, *args, **kwargs)
    cache.prompt_state.require_pieces()
    require_by_token(args, kwargs, tokens)
    if layer_idx not in cache.compressed_layers:
        return forward(hidden_states, *args, **kwargs)
    watch.remember(cache, tokens)
    layer = cache.layers[layer_idx]
    with cache.prompt_state.in_pieces(layer, tokens):
        for start in range(0, tokens, chunk_tokens):
            stop = min(start + chunk_tokens, tokens)
            own = {name: part_of(value, start, stop) for name, value in kwargs.items()}
            output = forward(hidden_states[:, start:stop], **own)
            hidden_states[:, start:stop] = output[0] if isinstance(output, tuple) else output
    return (hidden_states,) if isinstance(output, tuple) else hidden_states


def _read_norm(forward: Callable[..., Any], chunk_tokens: int, hidden_states: Tensor) -> Tensor:
    """Run a norm in pieces and in place, because it computes on a float32 copy of its input.

    An input of at most `chunk_tokens` tokens, or one for which gradients are computed, is normed at
    once and stays unchanged.

    Returns:
        The normed states; if they were made in pieces, `hidden_states` itself.
    """
    if hidden_states.shape[1] <= chunk_tokens or torch.is_grad_enabled():
        normed: Tensor = forward(hidden_states)
        return normed
    for start in range(0, hidden_states.shape[1], chunk_tokens):
        piece = hidden_states[:, start : start + chunk_tokens]
        piece.copy_(forward(piece))
    return hidden_states
