"""Spans of the text that the user drops from a cache or protects from eviction."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from snapkv.cache.layer import CompressedLayer
from snapkv.cache.prompt_state import PromptState
from snapkv.errors import wrong
from snapkv.ops import ScoreOptions
from snapkv.policies import PromptLayer
from snapkv.policies.spans import Span, Spans
from snapkv.storage.dense import DenseStore

RowSpans = Iterable[Span] | Sequence[Iterable[Span]]
"""Half-open spans of positions: one list for all rows, or one for each of them."""


def row_tokens(layer: CompressedLayer) -> list[int]:
    """Count the tokens that each row of a layer has seen.

    Dropped tokens count, and padding does not.
    """
    return layer.slots.row_tokens(len(layer.keys), layer.store.slots)


def spans_of_rows(given: Any, tokens: Sequence[int]) -> list[Spans]:
    """Convert spans as the user gives them to the spans of each row.

    Args:
        given: one list of spans for all rows, or one list for each row.
        tokens: how many tokens each row has seen.

    Returns:
        The spans of each row, in ascending order.

    Raises:
        InvalidArgumentError: a span is reversed or reaches beyond the tokens of its row, or the
            number of lists is not the number of rows.
        InvalidTypeError: `given` is anything else.
    """
    lists = list(given) if isinstance(given, list | tuple) else given
    by_row = isinstance(lists, list) and any(_is_list_of_spans(each) for each in lists)
    if by_row and len(lists) != len(tokens):
        raise wrong(
            "spans",
            f"expected one list of spans, or one list for each of the {len(tokens)} rows, but got "
            f"{len(lists)} lists",
            "For example, pass [[(0, 20)], []] for two rows",
        )
    if by_row:
        rows = [Spans.of("spans", own) for own in lists]
    else:
        rows = [Spans.of("spans", lists)] * len(tokens)
    for row, (own, seen) in enumerate(zip(rows, tokens, strict=True)):
        if own.parts and own.parts[-1][1] > seen:
            raise wrong(
                "spans",
                f"expected spans within the {seen:,} tokens that row {row} has read, but got "
                f"{own.parts[-1]}",
                "Count the positions from the first token of the row that is not padding",
            )
    return rows


def _is_list_of_spans(each: Any) -> bool:
    """Return whether `each` is a list of spans and not a span."""
    return isinstance(each, list | tuple) and (not each or isinstance(each[0], list | tuple))


def require_between_turns(prompt_state: PromptState) -> None:
    """Raise if the cache is in the middle of a prompt or turn.

    Raises:
        InvalidArgumentError: the prompt or turn was not read to its end.
    """
    slots = prompt_state.layers[0].slots
    begun = prompt_state.is_announced and prompt_state.seen_tokens != prompt_state.turn_start
    if begun or prompt_state.prompt_end is None or not slots.chosen_at:
        raise wrong(
            "spans",
            "spans cannot be dropped before the whole prompt has been read, but the cache has "
            f"only read {prompt_state.seen_tokens:,} tokens of it",
            "Drop the spans after the prompt has been read, or remove them from the prompt",
        )


def require_droppable(layers: Sequence[CompressedLayer], rows: Sequence[Spans]) -> None:
    """Raise if a row cannot drop its spans, before anything has changed.

    Args:
        layers: all compressed layers of the cache.
        rows: the spans that each row drops.

    Raises:
        InvalidArgumentError: a span is protected, a row would have no tokens left, or the rows
            would lose different numbers of the queries that vote with the next turn.
    """
    first = layers[0]
    _require_unprotected(first.protect, rows)
    for row, (own, seen) in enumerate(zip(rows, row_tokens(first), strict=True)):
        gone = own.union(first.slots.removed_spans_of(len(rows))[row])
        if gone.tokens >= seen:
            raise wrong(
                "spans",
                f"expected at least one token of row {row} to remain, but the spans would drop "
                f"all {seen:,} tokens",
                "Call cache.reset() to remove all tokens",
            )
    _require_alike_in_window(first, rows)


def require_turns_can_follow(layers: Sequence[CompressedLayer], rows: Sequence[Spans]) -> None:
    """Raise if the heads of a layer would store different numbers of tokens after the drop.

    Later turns cannot select from such heads. A cache that never selects again, or that restores
    its offloaded tokens first, is not checked.

    Raises:
        InvalidArgumentError: the heads of a layer would store different numbers of tokens.
    """
    if not layers[0].chooses_again or layers[0].offloaded.is_enabled:
        return
    for layer in layers:
        counts = _slots_without(layer, rows).sum(dim=-1)
        if bool((counts != counts[:, :1]).any()):
            raise wrong(
                "turns",
                "the spans cannot be dropped with turns='compress', because the heads of layer "
                f"{layer.identity.layer_idx} would then store different numbers of tokens",
                "Make the cache with recall='host'",
            )


def drop_spans(layers: Sequence[CompressedLayer], spans: Sequence[Spans]) -> None:
    """Drop the spans of each row from all layers and from the tokens that these have offloaded.

    Changes the layers in place. The caller must have checked the spans. If a layer had evicted only
    tokens that are dropped now, it becomes a layer that has evicted nothing. If the policy selects
    for all layers at once, this happens to all layers or to none.

    Args:
        layers: all compressed layers of a cache.
        spans: the positions that each row drops.

    Raises:
        OutOfMemoryError: the system has no memory for the offloaded tokens that remain.
    """
    for layer in layers:
        _drop(layer, spans)
    whole = [layer for layer in layers if _is_whole_again(layer)]
    if len(whole) == len(layers) or "all_layers" not in layers[0].policy.needs:
        for layer in whole:
            _make_whole(layer)


def _drop(layer: CompressedLayer, spans: Sequence[Spans]) -> None:
    """Remove the spans of each row from one layer, in place, and from its offloaded tokens."""
    slots, stays, offloaded = layer.slots, _slots_without(layer, spans), layer.offloaded
    every = torch.arange(layer.columns, device=stays.device).expand(len(spans), 1, -1)
    positions = slots.positions_of(every)
    left = ~_cover(spans, positions)[:, 0]
    if offloaded.tokens:
        if tokens := layer.columns - offloaded.tokens:
            # What remains takes less memory than before, so the limit need not be checked.
            offloaded.append(*layer.store.last(tokens), is_limited=False)
        offloaded.select_where(left & (positions[:, 0] >= 0))
    layer.queries.drop(left, positions[:, 0])
    slots, store = slots.without_spans(spans, stays), layer.store.select_where(stays)
    store.finalize_step()
    if slots.kept is not None:  # ragged heads hold no padding
        padding_slots = None if store.ragged is not None else store.slots - stays[:, 0].sum(dim=-1)
        slots = slots.with_kept(slots.kept, slots.start, padding_slots=padding_slots)
    layer.replace_tokens(store, slots)


def _is_whole_again(layer: CompressedLayer) -> bool:
    """Return whether a layer could store its tokens as if nothing had been evicted."""
    slots, store = layer.slots, layer.store
    if not store.is_exact and store.keys.shape[1] != store.num_kv_heads:
        return False
    return slots.kept is None or bool(slots.rows_without_evictions().all())


def _make_whole(layer: CompressedLayer) -> None:
    """Turn a layer that holds all columns into one that has evicted nothing, in place."""
    store = layer.store
    if layer.slots.kept is None:
        return
    if store.is_exact:  # quantized tokens stay as they are until the next prompt
        store = DenseStore().fill(*store.last(store.slots), store.num_kv_heads)
    layer.replace_tokens(store, layer.slots.without_evictions())


def protected_slots(
    layer: CompressedLayer, spans: Spans, slots: int, pads: Tensor | None
) -> Tensor:
    """Return a mask of the first `slots` slots that marks the tokens in protected spans.

    Args:
        layer: the layer that is about to select.
        spans: the protected spans.
        slots: how many slots to look at.
        pads: (B,) integers, the leading padding of a first prompt, or None. For later prompts the
            layer knows it.

    Returns:
        (B, 1 or H, slots) bool.
    """
    if layer.slots.kept is not None:
        return spans.cover(layer.stored_positions()[..., :slots])
    columns = torch.arange(slots, device=layer.keys.device).expand(len(layer.keys), 1, -1)
    return spans.cover(replace(layer.slots, pads=pads).positions_of(columns))


def layer_of_sizes(positions: Tensor, spans: Spans, num_layers: int, **options: Any) -> PromptLayer:
    """Build a `PromptLayer` without data, with which a policy can compute how much it would keep.

    Args:
        positions: (T,) integers, the positions of the prompt's tokens.
        spans: the protected spans.
        num_layers: how many layers the model has.
        **options: other fields of the `PromptLayer`.
    """
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
    """Raise if the spans to drop contain protected tokens.

    Args:
        protect: the protected spans; None for none.
        rows: the spans that each row drops.

    Raises:
        InvalidArgumentError: a span to drop overlaps a protected span.
    """
    for own in rows:
        if both := own.overlap(protect or Spans(())).parts:
            raise wrong(
                "spans",
                f"the tokens of {both[0]} are protected and cannot be dropped",
                "Drop other tokens, or make a new cache in which these tokens are not protected",
            )


def _require_alike_in_window(layer: CompressedLayer, rows: Sequence[Spans]) -> None:
    """Raise if the rows would lose different numbers of the queries that vote with the next turn.

    Raises:
        InvalidArgumentError: the numbers differ.
    """
    held = layer.queries.last
    if held is None or len(rows) == 1:
        return
    tokens, count = row_tokens(layer), held.shape[2]
    lost = {
        own.tokens - own.among_first(max(0, seen - count))
        for own, seen in zip(rows, tokens, strict=True)
    }
    if len(lost) > 1:
        raise wrong(
            "spans",
            f"the rows would drop different numbers of their last {count} tokens, which vote with "
            f"the next turn ({', '.join(map(str, sorted(lost)))})",
            "Use a separate cache for each conversation",
        )


def _slots_without(layer: CompressedLayer, spans: Sequence[Spans]) -> Tensor:
    """Return a mask of the slots whose token is in none of the spans of its row.

    Returns:
        (B, H, S) bool.
    """
    positions = layer.stored_positions()
    return (positions >= 0) & ~_cover(spans, positions)


def _cover(spans: Sequence[Spans], positions: Tensor) -> Tensor:
    """Return a mask of the positions that are in a span of their row.

    Args:
        spans: the spans of each row.
        positions: (B, H, S) integers.

    Returns:
        (B, H, S) bool.
    """
    return torch.stack([own.cover(row) for own, row in zip(spans, positions, strict=True)])
