"""What becomes of the tokens behind a prompt where heads differ in length."""

from dataclasses import replace

from snapkv.cache.layer import CompressedLayer
from snapkv.storage.ragged import RaggedStore


def absorb_tail(layer: CompressedLayer) -> None:
    """Give every head of different length its part of the tokens behind the prompt."""
    store, slots = layer.store, layer.slots
    if not isinstance(store, RaggedStore) or not store.tail_tokens:
        return
    columns, seen = slots.columns(store), layer.seen_tokens
    layer.notes = replace(layer.notes, slot_scores=layer.notes.scores_with(store.tail_tokens))
    store.absorb_tail()
    layer.slots = slots.chosen(columns, seen)
