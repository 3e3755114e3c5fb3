"""Spans that a user names of what a cache has seen: read, or refused before anything changes."""

from collections.abc import Iterable, Sequence
from typing import Any

from snapkv.cache.layer import CompressedLayer
from snapkv.cache.reading import Reading
from snapkv.errors import InvalidArgumentError
from snapkv.policies import EvictingPolicy
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


def require_between_turns(reading: Reading, action: str) -> None:
    """Refuse spans of a text that is still coming in."""
    reading.require_decided()
    slots = reading.layers[0].slots
    begun = reading.is_announced and reading.seen_tokens > reading.turn_start
    if begun or slots.is_partial or not slots.chosen_at:
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
    policy, rule = first.policy, first.spans
    if policy.needs & {"rotation", "queries"}:
        raise InvalidArgumentError(
            f"policy: expected one that does not ask where tokens stand for drop, got "
            f"{policy.name}; use SnapKV, KeyDiff or LagKV"
        )
    if rule.fair is not None:
        raise InvalidArgumentError(
            f"fair: expected none for drop, since segments share by their lengths, got "
            f"{', '.join(dict(rule.fair.parts))}; make the cache without fair"
        )
    _require_unprotected(rule.protect, rows, "drop")
    for row, (own, seen) in enumerate(zip(rows, first.slots.row_tokens(first.store), strict=True)):
        gone = own.union(first.slots.erased_spans(len(rows))[row])
        if gone.tokens >= seen:
            raise InvalidArgumentError(
                f"spans: expected to leave a token of row {row}, got all its {seen:,}; call "
                "cache.reset() instead"
            )
    _require_alike_in_window(first, rows)


def _require_unprotected(protect: Spans | None, rows: Sequence[Spans], action: str) -> None:
    for own in rows if protect is not None else ():
        if both := own.overlap(protect).parts:
            raise InvalidArgumentError(
                f"spans: expected none that is protected, got {both[0]}; {action} what lies "
                "outside, or make the cache without protecting it"
            )


def _require_alike_in_window(layer: CompressedLayer, rows: Sequence[Spans]) -> None:
    """Refuse rows that lose different numbers of the queries that vote with the next turn."""
    held = layer.notes.last_queries
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
            f"the next turn, got {', '.join(map(str, sorted(lost)))}; give each conversation a cache of "
            "its own"
        )
