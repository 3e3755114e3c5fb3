"""Evicting tokens from a layer while tokens are generated."""

from dataclasses import replace

from snapkv.cache.layer import CompressedLayer, scores_of_slots
from snapkv.policies import Eviction
from snapkv.policies.states import padding_left
from snapkv.storage.ragged import tokens_of
from snapkv.storage.ragged_store import RaggedStore


def absorb_tail(layer: CompressedLayer) -> None:
    """Move the tokens after the prompt into the heads of a ragged layer, so heads can evict them.

    Changes `layer` in place. A layer that is not ragged stays as it is.
    """
    store, tail = layer.store, layer.store.tail.tokens
    if not isinstance(store, RaggedStore) or not tail:
        return
    columns, end = layer.stored_columns(), layer.columns
    layer.state = replace(layer.state, slot_scores=layer.state.scores_with(tail))
    store.absorb_tail()
    layer.slots = layer.slots.with_kept(columns, end)


def apply_eviction(layer: CompressedLayer, eviction: Eviction) -> None:
    """Evict tokens after a decode step, and store the policy's scores of the remaining ones.

    Args:
        layer: the layer, which changes in place.
        eviction: which slots the policy keeps, and its new scores.

    Raises:
        InvalidArgumentError: the policy moves attention sinks, and the heads hold different numbers
            of tokens.
    """
    scores, heads, kept = eviction.scores, layer.keys.shape[1], eviction.keep_indices
    if kept is not None:
        kept = kept.expand(-1, heads, -1)
        scores = None if scores is None else scores_of_slots(scores, kept, heads)
    elif scores is not None:
        scores = scores.expand(-1, heads, -1)
    layer.state = replace(layer.state, slot_scores=scores)
    if kept is None:
        return
    slots, padding_slots = layer.store.slots, eviction.padding_slots
    is_ragged = layer.store.ragged is not None
    if eviction.per_head_budget or is_ragged:  # ragged heads hold no padding
        padding_slots = None
    elif padding_slots is None:
        padding_slots = padding_left(slots, kept.shape[-1], layer.slots.padding_slots)
    counts = tokens_of(kept) if eviction.per_head_budget and not is_ragged else None
    layer.select(kept, slots, counts, padding_slots=padding_slots)
    if eviction.sink_tokens:
        layer.move_sinks(eviction.sink_tokens)
