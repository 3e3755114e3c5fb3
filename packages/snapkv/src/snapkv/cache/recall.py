"""Recall: evicted tokens are offloaded and restored when a later prompt selects from all tokens."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from snapkv.cache.layer import CompressedLayer
from snapkv.storage.dense import DenseStore


def schedule_recall(layers: Iterable[CompressedLayer], *, is_prompt_next: bool) -> None:
    """Set whether each layer must restore its offloaded tokens before the next tokens are read.

    This only sets `is_due`. The next update of a layer restores its tokens.

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
    """Put the offloaded tokens back in front of the newer ones, as if none had been evicted."""
    layer.offloaded.is_due = False
    if _holds_all(layer):
        return
    tail = layer.store.last(layer.columns - layer.offloaded.tokens)
    keys, values = layer.offloaded.with_tail(*tail)
    store = DenseStore().fill(keys, values, layer.store.num_kv_heads)
    layer.replace_tokens(store, layer.slots.whole())


def _holds_all(layer: CompressedLayer) -> bool:
    """Return whether the store holds the exact keys and values of every token that was seen."""
    return layer.slots.kept is None and not layer.store.has_room and layer.store.is_exact


def set_aside(layer: CompressedLayer) -> None:
    """Offload all tokens of a layer between two pieces of a prompt, if the layer has recall."""
    offloaded, store, columns = layer.offloaded, layer.store, layer.columns
    if not offloaded.is_enabled:
        return
    offloaded.append_up_to(columns, store)
    none = torch.empty(*store.keys.shape[:2], 0, dtype=torch.int64, device=store.keys.device)
    layer.replace_tokens(store.select(none, store.slots), layer.slots.chosen(none, columns))
    offloaded.is_due = True


def begin_behind(
    layer: CompressedLayer, columns: int, pads: Tensor, *, forget_queries: bool
) -> None:
    """Put padding in front of the offloaded tokens of each row, so that all rows end together.

    Args:
        layer: a layer after `set_aside`, which changes in place.
        columns: how many columns each row has afterwards.
        pads: (B,) int64, how many of these columns are leading padding.
        forget_queries: whether to forget the queries that would vote with the next turn.
    """
    layer.offloaded.shift(pads, columns)
    layer.replace_tokens(layer.store, replace(layer.slots, start=columns))
    if forget_queries:
        layer.queries.held = None
