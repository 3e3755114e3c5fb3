"""Filling a new layer with tokens that a file or a document holds."""

from typing import Any

import torch
from torch import Tensor

from snapkv.cache.layer import CompressedLayer
from snapkv.cache.slots import SlotMap
from snapkv.storage.dense import DenseStore
from snapkv.storage.kinds import restored
from snapkv.storage.ragged_store import RaggedStore


def restore(layer: CompressedLayer, kind: str, stored: dict[str, Any], slots: SlotMap) -> None:
    """Fill a layer with the tokens of a store that was saved.

    Args:
        layer: an empty layer, which changes in place.
        kind: the `kind` of the store.
        stored: what the `state()` of the store has returned.
        slots: which token is in which slot of the store.

    Raises:
        ValueError: there is no such kind of store.
    """
    store = restored(kind, stored)
    layer.replace_tokens(store, slots if store.ragged is None else slots.without_padding())


def restore_chosen(
    layer: CompressedLayer, keys: Tensor, values: Tensor, places: Tensor, tokens: int
) -> None:
    """Fill a layer with the tokens that were selected from a prompt, whose number differs by head.

    Args:
        layer: an empty layer, which changes in place.
        keys: (B, H, K, D).
        values: (B, H, K, Dv).
        places: (B, H, K) int64, the columns of the tokens in ascending order, after a leading run
            of -1 in heads that hold fewer than K tokens.
        tokens: how many tokens the prompt had.
    """
    K = keys.shape[2]
    order = torch.arange(K, device=keys.device).where(places >= 0, -1)
    dense = DenseStore().fill(keys, values, keys.shape[1])
    slots = SlotMap().with_kept(places, tokens, chosen_at=tokens)
    layer.replace_tokens(RaggedStore.gather(dense, order, K), slots)
