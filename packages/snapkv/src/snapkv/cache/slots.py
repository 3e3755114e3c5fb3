"""Which token stands in which KV cache slot, and what else is noted of a layer's tokens.

A column is the place of a token in all that a layer has seen and was not told to drop, with pads;
its position leaves the pads of its row out, and counts what was dropped. Positions are computed
here, and nowhere else.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, SupportsIndex, TypeVar

import torch
from torch import Tensor

from snapkv import ops
from snapkv.cache.rows import RowRecord, per_row
from snapkv.errors import InvalidArgumentError, InvalidTypeError
from snapkv.policies.spans import Spans
from snapkv.storage.base import TokenStore

Count = TypeVar("Count", int, Tensor)
"""A number of tokens or slots, which the device counts while steps are recorded."""


@dataclass(frozen=True, kw_only=True)
class SlotMap(RowRecord):
    """The slots of a layer's store; immutable, and the same from one choice to the next.

    The first slots hold what was chosen, the others every token after it. While nothing was
    dropped every slot is of the second kind.

    Attributes:
        start: columns before the first token after the chosen ones.
        kept: (B, H, K) int32, columns of the first K slots, -1 where they hold none; None while
            nothing was dropped.
        pads: (B,) int64, leading columns of each row that are no tokens, or None.
        padding_slots: (B,) int64, leading slots that hold no token, or None.
        chosen_at: tokens seen when the layer last chose; 0 before the first prompt has ended.
        removed_spans: (B, N, 2) int64, half-open spans of positions that each row was told to drop,
            which are no columns any more, ascending, empty ones first; None where there are none.
        removed_tokens: tokens that were seen and are no columns: the fewest that a row is without.
            A row that is without more has pads for them.
    """

    start: int = 0
    kept: Tensor | None = per_row(slot_axis=2)
    pads: Tensor | None = per_row()
    padding_slots: Tensor | None = per_row()
    chosen_at: int = 0
    removed_spans: Tensor | None = per_row()
    removed_tokens: int = 0

    @functools.cached_property
    def chosen_slots(self) -> int:
        return 0 if self.kept is None else self.kept.shape[-1]

    @functools.cached_property
    def evicted_tokens(self) -> int:
        """Columns that no slot holds, where all heads and rows hold as many."""
        return self.start - self.chosen_slots

    @functools.cached_property
    def is_compressed(self) -> bool:
        """Whether a prompt has ended and some of it was dropped."""
        return self.kept is not None and self.chosen_at > 0

    @functools.cached_property
    def is_whole(self) -> bool:
        return self.kept is None

    def columns_by(self, slots: Count) -> Count:
        """Columns that a store of so many slots stands for."""
        return self.start + slots - self.chosen_slots

    def seen(self, slots: Count) -> Count:
        """Return how many tokens a layer has seen that holds so many slots.

        Args:
            slots: an int, or a tensor where the device counts; the result is the same.
        """
        return self.removed_tokens + self.columns_by(slots)

    @property
    def leading_padding(self) -> Tensor | None:
        """(B,) int64: how many leading slots of each row hold no token, or None for none."""
        return self.pads if self.kept is None else self.padding_slots

    @functools.cached_property
    def hidden_slots(self) -> Tensor | None:
        """`leading_padding`, or None if it is zero in every row; the device is asked once."""
        padding = self.leading_padding
        return padding if padding is not None and bool(padding.any()) else None

    # Where the tokens of a store are.

    def columns(self, store: TokenStore) -> Tensor:
        """(B, H, S) int64: the column of every slot; negative where it holds none."""
        B, H = store.keys.shape[:2]
        end = self.columns_by(store.slots)
        behind = torch.arange(self.start, end, device=store.keys.device).expand(B, H, -1)
        return behind.clone() if self.kept is None else torch.cat([self.kept.long(), behind], -1)

    def columns_of(self, indices: Tensor, store: TokenStore) -> Tensor:
        """(B, H or H', K): the columns of (B, H' or 1, K) slots; -1 stays."""
        stored = store.keys.shape[1]
        heads = max(indices.shape[1], stored)
        if heads > indices.shape[1]:
            indices = indices.expand(-1, heads, -1)
        if self.kept is None:
            return indices
        columns = self.kept if store.slots == self.chosen_slots else self.columns(store)
        if heads > stored:
            columns = columns.repeat_interleave(heads // stored, dim=1)
        return columns.gather(2, indices.clamp(min=0)).masked_fill(indices < 0, -1)

    def positions(self, store: TokenStore) -> Tensor:
        """(B, H, S) int64: the position of every slot's token, ascending; -1 for a pad."""
        return self.positions_of(self.columns(store))

    def positions_of(self, columns: Tensor) -> Tensor:
        """The positions of (B, H, S) columns; -1 for a pad."""
        ranks = columns if self.pads is None else columns - self.pads[:, None, None]
        ranks = ranks.clamp(min=-1)
        if self.removed_spans is None:
            return ranks
        lengths = self.removed_spans[..., 1] - self.removed_spans[..., 0]
        sums = lengths.cumsum(-1)
        after = self.removed_spans[..., 0] - (sums - lengths)  # rank of the token after each span
        return ranks + _sum_up_to(ranks, after, sums)

    def visible_columns(self, store: TokenStore, columns: int) -> Tensor:
        """Return which of the first columns, seen or to come, hold a token: (B, columns) bool."""
        pads = 0 if self.pads is None else self.pads[:, None]
        order = torch.arange(columns, device=store.keys.device).expand(len(store.keys), -1)
        return order >= self.removed_tokens + pads

    def whole_rows(self, store: TokenStore) -> Tensor:
        """(B,) bool: which rows of a compressed layer hold all that was seen.

        None of them where rows and heads hold as many tokens each.
        """
        if self.pads is None and self.padding_slots is None and not store.unmasked_slots:
            return torch.zeros(len(store.keys), dtype=torch.bool)
        held = (self.positions(store) >= 0).sum(dim=-1).amin(dim=-1)
        pads = 0 if self.pads is None else self.pads
        return torch.eq(held, self.columns_by(store.slots) - pads).cpu()

    def whole_tail(self, store: TokenStore) -> int:
        """How many of the last tokens every head and row still stores, and another before them."""
        columns, end = self.columns(store), self.columns_by(store.slots)
        last = torch.arange(end - columns.shape[-1], end, device=columns.device)
        whole = (columns == last).flip(-1).cumprod(dim=-1).sum(dim=-1)
        pads = 0 if self.pads is None else self.pads[:, None, None]
        held = (columns >= pads).sum(dim=-1)
        return int(whole.minimum(held - 1).min())

    def require_whole(self, tokens: int, store: TokenStore, layer_idx: int) -> None:
        """Refuse to take back more of the last tokens than every head and row still holds."""
        whole = store.slots if self.kept is None else self.whole_tail(store)
        if tokens > whole:
            raise InvalidArgumentError(
                f"tokens_to_remove: expected at most {whole}, the tokens at the end of layer "
                f"{layer_idx} that are still whole, got {tokens}; reset the cache and read the "
                "shorter prompt again"
            )

    def evicted_by_row(self, store: TokenStore) -> Tensor:
        """(B,) int64: tokens of each row that have been seen and are not stored; pads are none."""
        dropped = torch.full((store.keys.shape[0],), self.evicted_tokens, device=store.keys.device)
        if self.pads is not None:
            dropped = dropped - self.pads
        return dropped if self.padding_slots is None else dropped + self.padding_slots

    # What becomes of it.

    def chosen(self, kept: Tensor, columns: int, **changes: Any) -> Self:
        """Of the first columns the slots hold what was kept, and all that come after them."""
        return replace(self, kept=kept.to(torch.int32), start=columns, **changes)

    def whole(self) -> Self:
        return replace(self, kept=None, start=0, padding_slots=None)

    def without_padding(self) -> Self:
        """For heads of different length, which hold none."""
        if self.padding_slots is None or self.kept is None:
            return self
        slots = torch.arange(self.chosen_slots, device=self.kept.device)
        is_padding = slots < self.padding_slots[:, None, None]
        return replace(self, kept=self.kept.masked_fill(is_padding, -1), padding_slots=None)

    def cropped(self, tokens: int, slots: int) -> Self:
        """Without the last tokens; so many slots are left."""
        seen, columns = self.seen(slots), self.columns_by(slots)
        if columns and slots >= self.chosen_slots and self.chosen_at <= seen:
            return self
        return replace(
            super().cropped(tokens, slots),
            start=min(self.start, columns),
            pads=None if self.pads is None or not columns else self.pads.clamp(max=columns),
            chosen_at=min(self.chosen_at, seen),
        )

    # What a user drops.

    def row_tokens(self, store: TokenStore) -> list[int]:
        """B numbers: tokens of each row that were seen, dropped ones included."""
        B, seen = store.keys.shape[0], self.seen(store.slots)
        pads = [0] * B if self.pads is None else self.pads.tolist()
        removed = (each.tokens - self.removed_tokens for each in self.removed_spans_of(B))
        return [seen - own_pads + more for own_pads, more in zip(pads, removed, strict=True)]

    @property
    def mean_removed(self) -> float:
        """Tokens that a row was told to drop, on average."""
        if self.removed_spans is None:
            return 0
        return float(
            (self.removed_spans[..., 1] - self.removed_spans[..., 0]).sum(dim=-1).float().mean()
        )

    def removed_spans_of(self, rows: int) -> list[Spans]:
        """What each of the rows was told to drop."""
        if self.removed_spans is None:
            return [Spans(())] * rows
        return [
            Spans(tuple((start, stop) for start, stop in row if start < stop))
            for row in self.removed_spans.tolist()
        ]

    def without(self, spans: Sequence[Spans], store: TokenStore, stays: Tensor) -> Self:
        """The map when each row's spans are no columns any more: (B, H, S) bool slots stay."""
        rows, device = len(spans), store.keys.device
        removed_spans = [
            before.union(more)
            for before, more in zip(self.removed_spans_of(rows), spans, strict=True)
        ]
        tokens = self.row_tokens(store)
        left = torch.tensor(
            [own - each.tokens for own, each in zip(tokens, removed_spans, strict=True)]
        )
        columns = int(left.max())
        pads = (columns - left).to(device)
        moved = replace(
            self,
            removed_spans=_padded(removed_spans).to(device),
            removed_tokens=self.seen(store.slots) - columns,
            pads=pads if bool(pads.any()) else None,
        )
        if self.kept is None:
            return moved
        positions, slots = self.positions(store), ops.kept_indices(stays)
        starts, stops = moved.removed_spans.unbind(dim=-1)  # type: ignore[union-attr] # just made
        ranks = positions - _sum_up_to(positions, starts, (stops - starts).cumsum(-1))
        places = (ranks + pads[:, None, None]).gather(2, slots.clamp(min=0))
        return moved.chosen(places.masked_fill(slots < 0, -1), columns)

    def removed_among_last(self, tokens: int, store: TokenStore) -> list[int]:
        """B numbers: how many of a row's last tokens it was told to drop."""
        own = self.row_tokens(store)
        removed_spans = self.removed_spans_of(len(own))
        return [
            each.tokens - each.among_first(max(0, seen - tokens))
            for seen, each in zip(own, removed_spans, strict=True)
        ]

    def truncated(self, tokens: int, store: TokenStore) -> Self:
        """Without what was dropped of the last tokens, as many in every row."""
        if self.removed_spans is None:
            return self
        own, count = self.row_tokens(store), self.removed_among_last(tokens, store)[0]
        left = _padded(
            [
                each.without(Spans(((max(0, seen - tokens), seen),)))
                for seen, each in zip(own, self.removed_spans_of(len(own)), strict=True)
            ]
        ).to(self.removed_spans.device)
        return replace(self, removed_spans=left, removed_tokens=self.removed_tokens - count)


@dataclass(frozen=True, kw_only=True)
class LayerState(RowRecord):
    """What else is known of a layer's tokens; a field added here follows rows, crops and files.

    Attributes:
        slot_scores: (B, H, S) float32, what an evicting policy has noted of every slot.
        head_notes: (B, H, N) int64, what an evicting policy has noted of every head.
        token_ids: (B, N) int64, of the prompt as far as it has been read, then of the last step.
        sink_keys: (B, H, start, D), keys of attention sinks before they were moved on; the store
            holds them as they are now.
        sinks_moved: (B, 1, 1, 1) bool, whether a row's sinks have been moved.
        lost_mass, lost_peak: (B, H) float32, see `LostVotes`; None where nobody knows.
    """

    slot_scores: Tensor | None = per_row(slot_axis=2)
    head_notes: Tensor | None = per_row()
    token_ids: Tensor | None = per_row(token_axis=1)
    sink_keys: Tensor | None = per_row()
    sinks_moved: Tensor | None = per_row()
    lost_mass: Tensor | None = per_row(measured=True)
    lost_peak: Tensor | None = per_row(measured=True)

    def scores_with(self, new_tokens: int) -> Tensor | None:
        """(B, H, S) float32: `slot_scores`, zero for the new tokens after them."""
        if self.slot_scores is None:
            return None
        return torch.nn.functional.pad(self.slot_scores, (0, new_tokens))


def require_removable(tokens_to_remove: SupportsIndex) -> int:
    """How many of the last tokens a crop takes back: as transformers has it, a count below zero.

    Its releases pass an int or a tensor of one.
    """
    try:
        tokens_to_remove = operator.index(tokens_to_remove)
    except TypeError as error:
        raise InvalidTypeError(
            f"tokens_to_remove: expected an integer, got {tokens_to_remove!r}; pass -n to remove "
            "the last n tokens"
        ) from error
    if tokens_to_remove > 0:
        raise InvalidArgumentError(
            f"tokens_to_remove: expected zero or a negative number of tokens to remove, got "
            f"{tokens_to_remove}; pass -n to remove the last n tokens"
        )
    return -tokens_to_remove


def _sum_up_to(places: Tensor, begins: Tensor, sums: Tensor) -> Tensor:
    """Of each (B, H, S) place the last of (B, N) sums whose ascending begin it reaches, or 0."""
    reached = torch.searchsorted(begins.contiguous(), places.flatten(1).contiguous(), right=True)
    return torch.nn.functional.pad(sums, (1, 0)).gather(1, reached).view_as(places)


def _padded(spans: Sequence[Spans]) -> Tensor:
    """(B, N, 2) int64: the spans of every row, empty ones in front of them."""
    most = max(len(each.parts) for each in spans)
    rows = [((0, 0),) * (most - len(each.parts)) + each.parts for each in spans]
    return torch.tensor(rows, dtype=torch.int64).view(len(spans), most, 2)
