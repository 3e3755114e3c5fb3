"""Spans of the text: checked, dropped from a cache, and protected."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from snapkv.cache.layer import CompressedLayer
from snapkv.cache.prompt_state import PromptState
from snapkv.errors import InvalidArgumentError
from snapkv.ops import ScoreOptions
from snapkv.policies import PromptLayer
from snapkv.policies.spans import Span, Spans
from snapkv.storage.dense import DenseStore

RowSpans = Iterable[Span] | Sequence[Iterable[Span]]
"""Half-open spans of positions: one list for all rows, or one for each of them."""


def row_tokens(layer: CompressedLayer) -> list[int]:
    """Count the tokens that each row has seen, dropped ones included and pads left out."""
    return layer.slots.row_tokens(len(layer.keys), layer.store.slots)


def spans_of_rows(given: Any, tokens: Sequence[int]) -> list[Spans]:
    """The spans of each row, which has seen so many tokens.

    Raises:
        InvalidArgumentError: a span that is reversed or reaches beyond them, another number of
            lists than of rows.
        InvalidTypeError: something else than spans.
    """
    lists = list(given) if isinstance(given, list | tuple) else given
    by_row = isinstance(lists, list) and any(_is_list_of_spans(each) for each in lists)
    if by_row and len(lists) != len(tokens):
        raise InvalidArgumentError(
            f"spans: expected one list, or one for each of {len(tokens)} rows, got {len(lists)} "
            "lists; pass for instance [[(0, 20)], []] for two rows"
        )
    if by_row:
        rows = [Spans.of("spans", own) for own in lists]
    else:
        rows = [Spans.of("spans", lists)] * len(tokens)
    for row, (own, seen) in enumerate(zip(rows, tokens, strict=True)):
        if own.parts and own.parts[-1][1] > seen:
            raise InvalidArgumentError(
                f"spans: expected spans of the {seen:,} tokens that row {row} has seen, got "
                f"{own.parts[-1]}; count from its first token, pads left out"
            )
    return rows


def _is_list_of_spans(each: Any) -> bool:
    """Whether it is the spans of a row, and no span itself."""
    return isinstance(each, list | tuple) and (not each or isinstance(each[0], list | tuple))


def require_between_turns(prompt_state: PromptState) -> None:
    """Refuse spans of a text that is still coming in."""
    slots = prompt_state.layers[0].slots
    begun = prompt_state.is_announced and prompt_state.seen_tokens != prompt_state.turn_start
    if begun or prompt_state.prompt_end is None or not slots.chosen_at:
        raise InvalidArgumentError(
            f"spans: expected a prompt that was read to its end for drop, got "
            f"{prompt_state.seen_tokens:,} tokens of one; drop after it, or leave the span out of "
            "the prompt"
        )


def require_droppable(layers: Sequence[CompressedLayer], rows: Sequence[Spans]) -> None:
    """Refuse what would change more than that each row's spans are gone."""
    first = layers[0]
    _require_unprotected(first.protect, rows)
    for row, (own, seen) in enumerate(zip(rows, row_tokens(first), strict=True)):
        gone = own.union(first.slots.removed_spans_of(len(rows))[row])
        if gone.tokens >= seen:
            raise InvalidArgumentError(
                f"spans: expected to leave a token of row {row}, got all its {seen:,}; call "
                "cache.reset() instead"
            )
    _require_alike_in_window(first, rows)


def require_turns_can_follow(layers: Sequence[CompressedLayer], rows: Sequence[Spans]) -> None:
    """Refuse to leave heads of different length where a turn chooses out of what is stored."""
    if not layers[0].chooses_again or layers[0].offloaded.is_enabled:
        return
    for layer in layers:
        counts = _slots_without(layer, rows).sum(dim=-1)
        if bool((counts != counts[:, :1]).any()):
            raise InvalidArgumentError(
                f"turns: expected spans of which every head holds as many where later turns choose "
                f"of what is stored, got turns='compress' and heads of layer "
                f"{layer.identity.layer_idx} that would differ; pass recall='host'"
            )


def drop_spans(layers: Sequence[CompressedLayer], spans: Sequence[Spans]) -> None:
    """Drop the spans of each row from all layers and from what these have offloaded.

    The caller must have checked the spans. A layer that had evicted nothing but what is dropped
    now holds all columns: it is whole again, as if its text had never had the spans. If the policy
    chooses for all layers at once, they are whole together or not at all.
    """
    for layer in layers:
        _drop(layer, spans)
    whole = [layer for layer in layers if _is_whole_again(layer)]
    if len(whole) == len(layers) or "all_layers" not in layers[0].policy.needs:
        for layer in whole:
            _make_whole(layer)


def _drop(layer: CompressedLayer, spans: Sequence[Spans]) -> None:
    slots, stays, offloaded = layer.slots, _slots_without(layer, spans), layer.offloaded
    every = torch.arange(layer.columns, device=stays.device).expand(len(spans), 1, -1)
    positions = slots.positions_of(every)
    left = ~_cover(spans, positions)[:, 0]
    if offloaded.tokens:
        if tokens := layer.columns - offloaded.tokens:
            # What is left takes less room than before, so that the limit does not matter.
            offloaded.append(*layer.store.last(tokens), is_limited=False)
        offloaded.select_where(left & (positions[:, 0] >= 0))
    layer.queries.drop(left, positions[:, 0])
    slots, store = slots.without(spans, stays), layer.store.select_where(stays)
    store.finalize_step()
    if slots.kept is not None:  # ragged heads hold no padding
        padding_slots = None if store.ragged is not None else store.slots - stays[:, 0].sum(dim=-1)
        slots = slots.chosen(slots.kept, slots.start, padding_slots=padding_slots)
    layer.replace_tokens(store, slots)


def _is_whole_again(layer: CompressedLayer) -> bool:
    """Whether every head holds all columns, in a form that a layer has which dropped nothing."""
    slots, store = layer.slots, layer.store
    if not store.is_exact and store.keys.shape[1] != store.num_kv_heads:
        return False
    return slots.is_whole or bool(slots.whole_rows().all())


def _make_whole(layer: CompressedLayer) -> None:
    """Hold all columns in the way of a layer that has dropped nothing."""
    store = layer.store
    if layer.slots.kept is None:
        return
    if store.is_exact:  # codes stay until a prompt follows
        store = DenseStore().fill(*store.last(store.slots), store.num_kv_heads)
    layer.replace_tokens(store, layer.slots.whole())


def protected_slots(
    layer: CompressedLayer, spans: Spans, slots: int, pads: Tensor | None
) -> Tensor:
    """Return which of the first slots stand for positions in the protected spans.

    Args:
        layer: the layer that is about to choose.
        spans: what is protected.
        slots: how many of its slots to look at.
        pads: (B,) leading pads of a first prompt, or None; the layer knows those of later ones.

    Returns:
        (B, 1 or H, slots) bool.
    """
    if layer.slots.kept is not None:
        return spans.cover(layer.stored_positions()[..., :slots])
    columns = torch.arange(slots, device=layer.keys.device).expand(len(layer.keys), 1, -1)
    return spans.cover(replace(layer.slots, pads=pads).positions_of(columns))


def layer_of_sizes(positions: Tensor, spans: Spans, num_layers: int, **options: Any) -> PromptLayer:
    """The first of some layers at the end of a prompt of such positions, with nothing in it."""
    nothing = torch.empty(1, 1, len(positions), 0, dtype=torch.float32)
    return PromptLayer(
        queries=nothing,
        keys=nothing,
        values=nothing,
        score_options=ScoreOptions(scaling=1.0),
        layer_idx=0,
        num_layers=num_layers,
        protected=spans.cover(positions[None, None]),
        **options,
    )


def _require_unprotected(protect: Spans | None, rows: Sequence[Spans]) -> None:
    for own in rows:
        if both := own.overlap(protect or Spans(())).parts:
            raise InvalidArgumentError(
                f"spans: expected none that is protected, got {both[0]}; drop what is outside, "
                "or make the cache without protecting it"
            )


def _require_alike_in_window(layer: CompressedLayer, rows: Sequence[Spans]) -> None:
    """Refuse rows that lose different numbers of the queries that vote with the next turn."""
    held = layer.queries.last
    if held is None or len(rows) == 1:
        return
    tokens, count = row_tokens(layer), held.shape[2]
    lost = {
        own.tokens - own.among_first(max(0, seen - count))
        for own, seen in zip(rows, tokens, strict=True)
    }
    if len(lost) > 1:
        raise InvalidArgumentError(
            f"spans: expected as many of the last {count} tokens of every row, which vote with "
            f"the next turn, got {', '.join(map(str, sorted(lost)))}; give each conversation a "
            "cache of its own"
        )


def _slots_without(layer: CompressedLayer, spans: Sequence[Spans]) -> Tensor:
    """Return (B, H, S) bool: which slots hold a token that is in none of its row's spans."""
    positions = layer.stored_positions()
    return (positions >= 0) & ~_cover(spans, positions)


def _cover(spans: Sequence[Spans], positions: Tensor) -> Tensor:
    """Return (B, H, S) bool: which positions lie in a span of their row."""
    return torch.stack([own.cover(row) for own, row in zip(spans, positions, strict=True)])
