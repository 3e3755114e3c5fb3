"""Spans that a user names of what a cache has seen: read, or refused before anything changes."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from snapkv.cache.indexed import IndexedLayer
from snapkv.cache.layer import CompressedLayer
from snapkv.cache.reading import Reading
from snapkv.errors import InvalidArgumentError, InvalidTypeError
from snapkv.ops import ScoreOptions
from snapkv.policies import EvictingPolicy, PrefixPolicy, PromptLayer
from snapkv.policies.around import AroundScores
from snapkv.policies.budget import ByteBudget, budget_of, share_of
from snapkv.policies.spans import Span, Spans
from snapkv.validation import require_int

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


def require_between_turns(reading: Reading, action: str) -> None:
    """Refuse spans of a text that is still coming in."""
    reading.require_decided()
    slots = reading.layers[0].slots
    begun = reading.is_announced and reading.seen_tokens != reading.turn_start
    if begun or reading.prompt_end is None or slots.is_partial or not slots.chosen_at:
        raise InvalidArgumentError(
            f"spans: expected a prompt that was read to its end for {action}, got "
            f"{reading.seen_tokens:,} tokens of one; {action} behind it, or leave the span out of "
            "the prompt"
        )


def require_choosable(layers: Sequence[CompressedLayer], action: str) -> None:
    """Refuse where slots cannot go one by one."""
    policy = layers[0].policy
    if isinstance(policy, EvictingPolicy):
        raise InvalidArgumentError(
            f"policy: expected one that only compresses prompts for {action}, got {policy.name}, "
            f"which counts what it has evicted by; use SnapKV, or do not {action}"
        )
    if any(layer.is_compileable for layer in layers):
        raise InvalidArgumentError(
            f"storage: expected 'dynamic' for {action}, got 'static', whose buffer stays as it is; "
            f"make the CompressedCache without storage, or do not {action}"
        )


def require_droppable(layers: Sequence[CompressedLayer], rows: Sequence[Spans]) -> None:
    """Refuse what would change more than that each row's spans are gone."""
    first = layers[0]
    policy = first.policy
    if policy.needs & {"rotation", "queries"}:
        raise InvalidArgumentError(
            f"policy: expected one that does not ask where tokens stand for drop, got "
            f"{policy.name}; use SnapKV, KeyDiff or LagKV"
        )
    _require_unprotected(first.protect, rows, "drop")
    for row, (own, seen) in enumerate(zip(rows, first.slots.row_tokens(first.store), strict=True)):
        gone = own.union(first.slots.erased_spans(len(rows))[row])
        if gone.tokens >= seen:
            raise InvalidArgumentError(
                f"spans: expected to leave a token of row {row}, got all its {seen:,}; call "
                "cache.reset() instead"
            )
    _require_alike_in_window(first, rows)


def require_compressible(layers: Sequence[CompressedLayer], rows: Sequence[Spans]) -> PrefixPolicy:
    """The method that scores what the spans hold; refuse one that cannot."""
    policy = layers[0].policy
    scorer = policy.policy if isinstance(policy, AroundScores) else policy
    is_scored = isinstance(scorer, PrefixPolicy) and not (scorer.needs or policy.draft_tokens)
    if not is_scored or policy.parts_groups:
        raise InvalidArgumentError(
            f"policy: expected one that scores the tokens of a KV head by queries or keys alone "
            f"for compress, got {policy!r}; use SnapKV, AdaKV or KeyDiff, or drop the spans"
        )
    assert isinstance(scorer, PrefixPolicy)
    if scorer.query_tokens and not all(map(_has_queries, layers)):
        raise InvalidArgumentError(
            f"policy: expected the last queries for compress, by which {scorer.name} scores and "
            "which a cache holds with recall or turns='compress', got none; pass recall='host', "
            "or use KeyDiff"
        )
    _require_unprotected(layers[0].protect, rows, "compress")
    return scorer


def _has_queries(layer: CompressedLayer) -> bool:
    """Whether it holds some: not where the last turn's tokens were dropped."""
    held = layer.last_queries
    return held is not None and held.shape[2] > 0


def tokens_to_keep(budget: int | str, rows: Sequence[Spans]) -> list[int]:
    """B numbers: how many tokens of its spans each head of a row may keep."""
    read = ByteBudget.read(budget)
    if isinstance(read, ByteBudget) and read.share is not None:
        return [max(1, share_of(own.tokens, read.share)) for own in rows]
    if not isinstance(read, int):
        raise InvalidTypeError(
            f"budget: expected a number of tokens or a part of the spans', got {budget!r}; pass "
            "for instance 128 or '12%'"
        )
    require_int("budget", read, minimum=1)
    return [read] * len(rows)


def best_of_spans(
    layer: CompressedLayer, rows: Sequence[Spans], kept: Sequence[int], scores: Tensor
) -> Tensor:
    """(B, H, S) bool: the slots that stay, so many of the spans' in each head, and all others.

    Of equal scores the lower position wins. What scores inf stays anyway.
    """
    inside = layer.slots_without([Spans(())] * len(rows)) & ~layer.slots_without(rows)
    order = scores.masked_fill(~inside, float("-inf")).sort(dim=-1, descending=True, stable=True)
    ranks = order.indices.argsort(dim=-1)
    most = torch.tensor(kept, device=ranks.device)[:, None, None]
    best = inside & ((ranks < most) | scores.isinf())
    return layer.slots_without(rows) | best


def require_turns_can_follow(
    layers: Sequence[CompressedLayer], stays: Callable[[CompressedLayer], Tensor]
) -> None:
    """Refuse to leave heads of different length where a turn chooses out of what is stored."""
    if not layers[0].chooses_again or layers[0].offloaded is not None:
        return
    for layer in layers:
        counts = stays(layer).sum(dim=-1)
        if bool((counts != counts[:, :1]).any()):
            raise InvalidArgumentError(
                f"turns: expected spans of which every head holds as many where later turns choose "
                f"of what is stored, got turns='compress' and heads of layer "
                f"{layer.identity.layer_idx} that would differ; pass recall='host'"
            )


def require_one_mask(
    layers: Sequence[CompressedLayer], stays: Callable[[CompressedLayer], Tensor]
) -> None:
    """Refuse to leave other numbers of a row's tokens in layers that share a mask."""
    if not isinstance(layers[0], IndexedLayer):
        return
    found = {tuple(stays(layer)[:, 0].sum(dim=-1).tolist()) for layer in layers}
    if len(found) > 1:
        raise InvalidArgumentError(
            f"spans: expected spans of which all layers hold as many where an indexer chooses, "
            f"since they share one mask, got layers that would be left with "
            f"{', '.join(sorted(str(sum(each)) for each in found))} tokens; read what is left into "
            "a new cache"
        )


def require_protectable(layers: Sequence[CompressedLayer], spans: Spans) -> None:
    """Refuse spans of which something is gone that cannot be recalled."""
    for layer in layers:
        if not layer.seen_tokens:
            continue
        slots, store = layer.slots, layer.store
        tokens = slots.row_tokens(store)
        for own in slots.erased_spans(len(tokens)):
            if both := own.overlap(spans).parts:
                raise InvalidArgumentError(
                    f"spans: expected none that was dropped to protect, got {both[0]}; protect "
                    "what is left"
                )
        held = spans.cover(layer.stored_positions()).sum(dim=-1).amin(dim=-1).tolist()
        missing = max(spans.among_first(seen) - own for seen, own in zip(tokens, held, strict=True))
        if missing and layer.offloaded is None:
            raise InvalidArgumentError(
                f"spans: expected tokens that every head still holds to protect, got spans of "
                f"which a head of layer {layer.identity.layer_idx} has evicted {missing:,}; "
                "protect them before the prompt, or pass recall='host'"
            )


def require_room_in_turns(layers: Sequence[CompressedLayer], spans: Spans) -> None:
    """Refuse to protect more than the shortest turn to come has room for; bytes it tells itself."""
    first = layers[0]
    policy, slots = first.policy, first.slots
    is_chosen_again = first.chooses_again and first.store.is_filled
    if not is_chosen_again or isinstance(budget_of(policy), ByteBudget):
        return
    tokens = slots.row_tokens(first.store)
    for seen, erased in zip(tokens, slots.erased_spans(len(tokens)), strict=True):
        positions = torch.arange(seen + 1)
        left = positions[~erased.cover(positions)]
        policy.require_room(layer_of_sizes(left, spans, len(layers)))


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


def _require_unprotected(protect: Spans | None, rows: Sequence[Spans], action: str) -> None:
    for own in rows:
        if both := own.overlap(protect or Spans(())).parts:
            raise InvalidArgumentError(
                f"spans: expected none that is protected, got {both[0]}; {action} what lies "
                "outside, or make the cache without protecting it"
            )


def _require_alike_in_window(layer: CompressedLayer, rows: Sequence[Spans]) -> None:
    """Refuse rows that lose different numbers of the queries that vote with the next turn."""
    held = layer.last_queries
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
