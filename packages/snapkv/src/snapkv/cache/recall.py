"""Recall: offloaded tokens are restored before a layer reads a later prompt."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from snapkv.cache.layer import CompressedLayer
from snapkv.storage.dense import DenseStore


def schedule_recall(layers: Iterable[CompressedLayer], *, is_prompt_next: bool) -> None:
    """Set whether each layer must restore its offloaded tokens before it reads the next tokens.

    This only sets `OffloadedTokens.is_due`. The next update of a layer restores its tokens.

    Args:
        layers: the layers of one cache. Layers without recall stay as they are.
        is_prompt_next: whether the next tokens belong to a prompt, at whose end the policy selects
            from all tokens. A layer without tokens on the device restores them in any case.
    """
    for layer in layers:
        if layer.offloaded.is_enabled:
            is_needed = is_prompt_next or layer.store.slots == 0
            layer.offloaded.is_due = is_needed and not _holds_all(layer)


def restore_offloaded(layer: CompressedLayer) -> None:
    """Restore the offloaded tokens of a layer, so that it stores every token in one dense store.

    The layer changes in place. Does nothing if the layer stores all tokens exactly.
    """
    layer.offloaded.is_due = False
    if _holds_all(layer):
        return
    tail = layer.store.last(layer.columns - layer.offloaded.tokens)
    keys, values = layer.offloaded.with_tail(*tail)
    store = DenseStore().fill(keys, values, layer.store.num_kv_heads)
    layer.replace_tokens(store, layer.slots.without_evictions())


def _holds_all(layer: CompressedLayer) -> bool:
    """Return whether the store holds the exact keys and values of every token that was seen."""
    return layer.slots.kept is None and not layer.store.has_room and layer.store.is_exact


def offload_all(layer: CompressedLayer) -> None:
    """Offload all tokens of a layer, and store none of them until the next tokens are read.

    Does nothing if the layer has no recall.

    Raises:
        OutOfMemoryError: there is no room for the offloaded tokens.
    """
    offloaded, store, columns = layer.offloaded, layer.store, layer.columns
    if not offloaded.is_enabled:
        return
    offloaded.append_up_to(columns, store)
    none = torch.empty(*store.keys.shape[:2], 0, dtype=torch.int64, device=store.keys.device)
    layer.replace_tokens(store.select(none, store.slots), layer.slots.with_kept(none, columns))
    offloaded.is_due = True


def pad_in_front(
    layer: CompressedLayer, columns: int, pads: Tensor, *, forget_queries: bool
) -> None:
    """Put padding in front of the offloaded tokens of each row, so that all rows end together.

    Args:
        layer: a layer after `offload_all`, which changes in place.
        columns: how many columns each row has afterwards.
        pads: (B,) int64, how many of these columns are leading padding.
        forget_queries: whether to forget the queries that would vote with the next turn.
    """
    layer.offloaded.shift(pads, columns)
    layer.replace_tokens(layer.store, replace(layer.slots, start=columns))
    if forget_queries:
        layer.queries.held = None
