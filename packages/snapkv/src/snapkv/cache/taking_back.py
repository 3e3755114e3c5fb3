"""Removing the last tokens from all layers of a cache, or from none."""

import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

from snapkv.cache.layer import CompressedLayer
from snapkv.cache.recall import restore_offloaded
from snapkv.errors import InvalidTypeError, wrong
from snapkv.storage import uncompressed


def count_to_remove(tokens_to_remove: SupportsIndex) -> int:
    """Convert the argument of `crop` to the number of tokens that it removes.

    Args:
        tokens_to_remove: zero, or minus the number of tokens. Depending on its release,
            transformers passes an int or a tensor that holds one.

    Returns:
        The number of tokens, which is not negative.

    Raises:
        InvalidArgumentError: the number is positive.
        InvalidTypeError: `tokens_to_remove` is not an integer.
    """
    try:
        tokens_to_remove = operator.index(tokens_to_remove)
    except TypeError as error:
        raise wrong(
            "tokens_to_remove",
            f"expected an integer, but got {tokens_to_remove!r}",
            "For example, pass -2 to remove the last two tokens",
            InvalidTypeError,
        ) from error
    if tokens_to_remove > 0:
        raise wrong(
            "tokens_to_remove",
            f"expected zero or a negative number of tokens to remove, but got {tokens_to_remove}",
            "For example, pass -2 to remove the last two tokens",
        )
    return -tokens_to_remove


def take_back(layers: Sequence[Any], tokens: int) -> bool:
    """Remove the last `tokens` tokens from all layers of a cache, in place.

    Args:
        layers: all layers of the cache, compressed or not.
        tokens: how many tokens to remove.

    Returns:
        Whether the compressed layers had to restore their offloaded tokens first.

    Raises:
        InvalidArgumentError: a layer cannot remove that many tokens. No layer has changed then.
    """
    must_restore = [
        must_restore_before(layer, tokens, layer_idx) for layer_idx, layer in enumerate(layers)
    ]
    for layer in layers:
        if any(must_restore) and isinstance(layer, CompressedLayer):
            restore_offloaded(layer)
        uncompressed.crop(layer, tokens)
    return any(must_restore)


def must_restore_before(layer: Any, tokens: int, layer_idx: int) -> bool:
    """Return whether a layer must restore its offloaded tokens before it removes the last ones.

    This function changes nothing. A compressed layer can remove the tokens at its end that every
    head still stores. If it offloads evicted tokens, it can also restore all of them first.

    Args:
        layer: the layer, compressed or not.
        tokens: how many tokens are to be removed.
        layer_idx: the index of the layer, for the error.

    Raises:
        InvalidArgumentError: the layer cannot remove that many tokens, because its recurrent state
            or its sliding window does not go back so far, because the batch rows have dropped
            different numbers of these tokens, or because a head has evicted a token that it would
            need.
    """
    uncompressed.require_croppable(layer, tokens, layer_idx)
    if not isinstance(layer, CompressedLayer):
        return False
    slots, store, offloaded = layer.slots, layer.store, layer.offloaded
    dropped = slots.removed_among_last(min(tokens, layer.seen_tokens), store.slots)
    if len(set(dropped)) > 1:
        raise wrong(
            "tokens_to_remove",
            f"cannot remove the last {tokens:,} tokens, because the rows have already dropped "
            f"different numbers of them ({', '.join(map(str, dropped))})",
            "Remove fewer tokens, or use a separate cache for each conversation",
        )
    columns = tokens - dropped[0]
    if not columns:
        return False
    is_compressed = slots.kept is not None
    whole = slots.count_unbroken_tail(store.slots) if is_compressed else store.slots
    if offloaded.is_enabled and tokens <= layer.seen_tokens:
        # A later prompt selects from exact keys and values, so quantized tokens that remain from
        # a prompt must be restored.
        left_in_codes = layer.columns - columns < offloaded.tokens and not store.is_exact
        return columns > whole if is_compressed else left_in_codes
    if is_compressed and not layer.is_croppable:
        raise wrong(
            "tokens_to_remove",
            f"{layer.policy.name} cannot remove {columns} tokens, because it has already evicted "
            "other tokens by their attention",
            "Reset the cache and read the shorter text again, or use a policy that only compresses "
            "prompts",
        )
    if columns > whole:
        raise wrong(
            "tokens_to_remove",
            f"expected at most {whole}, because only these tokens at the end of layer {layer_idx} "
            f"are still stored by every head, but got {columns}",
            "Reset the cache and read the shorter prompt again",
        )
    return False
