"""What becomes of the tokens behind a prompt where heads differ in length."""

from dataclasses import replace

from snapkv.cache.layer import CompressedLayer
from snapkv.cache.slots import pads_first
from snapkv.storage.ragged import RaggedStore


def absorb_tail(layer: CompressedLayer) -> None:
    """Give every head of different length its part of the tokens behind the prompt."""
    store, slots = layer.store, layer.slots
    if not isinstance(store, RaggedStore) or not store.tail_tokens:
        return
    tail, seen, real = store.tail_tokens, layer.seen_tokens, None
    columns, scores = slots.columns(store), layer.notes.scores_with(tail)
    if slots.gaps is not None:
        real = slots.visible_columns(store, tail)
        columns[..., columns.shape[-1] - tail :].masked_fill_(~real[:, None], -1)
    store.absorb_tail(real)
    if real is not None:
        order = pads_first(columns >= 0)[..., -store.slots :]
        columns = columns.gather(-1, order)
        scores = None if scores is None else scores.gather(-1, order)
    layer.slots = slots.chosen(columns, seen)
    layer.notes = replace(layer.notes, slot_scores=scores)
