"""Spans to drop of what a cache has seen: read, or refused before anything changes."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from snapkv.cache.layer import CompressedLayer
from snapkv.cache.prompt_state import PromptState
from snapkv.errors import InvalidArgumentError
from snapkv.ops import ScoreOptions
from snapkv.policies import PromptLayer
from snapkv.policies.spans import Span, Spans

RowSpans = Iterable[Span] | Sequence[Iterable[Span]]
"""Half-open spans of positions: one list for all rows, or one for each of them."""


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
    for row, (own, seen) in enumerate(zip(rows, first.slots.row_tokens(first.store), strict=True)):
        gone = own.union(first.slots.removed_spans_of(len(rows))[row])
        if gone.tokens >= seen:
            raise InvalidArgumentError(
                f"spans: expected to leave a token of row {row}, got all its {seen:,}; call "
                "cache.reset() instead"
            )
    _require_alike_in_window(first, rows)


def require_turns_can_follow(layers: Sequence[CompressedLayer], rows: Sequence[Spans]) -> None:
    """Refuse to leave heads of different length where a turn chooses out of what is stored."""
    if not layers[0].chooses_again or layers[0].offloaded is not None:
        return
    for layer in layers:
        counts = layer.slots_without(rows).sum(dim=-1)
        if bool((counts != counts[:, :1]).any()):
            raise InvalidArgumentError(
                f"turns: expected spans of which every head holds as many where later turns choose "
                f"of what is stored, got turns='compress' and heads of layer "
                f"{layer.identity.layer_idx} that would differ; pass recall='host'"
            )


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
    tokens, count = layer.slots.row_tokens(layer.store), held.shape[2]
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
