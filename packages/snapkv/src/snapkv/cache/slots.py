"""Which token stands in which KV cache slot, and what else is noted of a layer's tokens.

A column is the place of a token in all that a layer has seen and was not told to drop, with pads;
its position leaves the pads of its row out, and counts what was dropped. Positions are computed
here, and nowhere else.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from snapkv import ops
from snapkv.cache.rows import RowRecord, per_row
from snapkv.policies.spans import Spans

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

    def columns(self, slots: int, device: torch.device) -> Tensor:
        """Return the column of every one of `slots` slots; negative where a slot holds no token.

        Returns:
            (B, H, S) int64 on `device`; (1, 1, S) while nothing was dropped, since the slots of all
            rows and heads then stand for the same columns.
        """
        behind = torch.arange(self.start, self.columns_by(slots), device=device)
        if self.kept is None:
            return behind[None, None]
        return torch.cat([self.kept.long(), behind.expand(*self.kept.shape[:2], -1)], dim=-1)

    def columns_of(self, indices: Tensor, slots: int) -> Tensor:
        """Return the columns of some of `slots` slots.

        Args:
            indices: (B, H', K) int64, slots; -1, which stays, for none. H' is H, or a multiple of
                it where query heads keep sets of their own.
            slots: how many slots the layer has.
        """
        if self.kept is None:
            return indices
        is_all_chosen = slots == self.chosen_slots
        columns = self.kept if is_all_chosen else self.columns(slots, self.kept.device)
        if indices.shape[1] > columns.shape[1]:
            columns = columns.repeat_interleave(indices.shape[1] // columns.shape[1], dim=1)
        return columns.gather(2, indices.clamp(min=0)).masked_fill(indices < 0, -1)

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

    def visible_columns(self, columns: int, rows: int, device: torch.device) -> Tensor:
        """Return which of the first columns, seen or to come, hold a token.

        Returns:
            (rows, columns) bool on `device`. Tokens that every row was told to drop count as pads
            in front.
        """
        first = torch.full((rows, 1), self.removed_tokens, device=device)
        if self.pads is not None:
            first = first + self.pads[:, None]
        return torch.arange(columns, device=device) >= first

    def whole_rows(self) -> Tensor:
        """Return (B,) bool: which rows of a layer that has dropped something hold all their tokens.

        Every head of the row then holds all columns that are no pads.
        """
        assert self.kept is not None
        columns = torch.arange(self.evicted_tokens, self.start, device=self.kept.device)
        pads = self.kept.new_zeros(len(self.kept)) if self.pads is None else self.pads
        is_held = (self.kept == columns) | (columns < pads[:, None, None])
        return is_held.flatten(1).all(dim=1) & (pads >= self.evicted_tokens)

    def whole_tail(self, slots: int) -> int:
        """Count the last tokens that every head and row still stores, with another before them.

        The layer has `slots` slots and has dropped something.
        """
        assert self.kept is not None
        columns, end = self.columns(slots, self.kept.device), self.columns_by(slots)
        last = torch.arange(end - columns.shape[-1], end, device=columns.device)
        whole = (columns == last).flip(-1).cumprod(dim=-1).sum(dim=-1)
        pads = 0 if self.pads is None else self.pads[:, None, None]
        held = (columns >= pads).sum(dim=-1)
        return int(whole.minimum(held - 1).min())

    def evicted_by_row(self) -> Tensor:
        """Return (B,) int64: how many tokens, pads left out, each row has seen and does not store.

        The layer has dropped something, and all heads of a row hold the same number of tokens.
        """
        assert self.kept is not None
        dropped = torch.full(self.kept.shape[:1], self.evicted_tokens, device=self.kept.device)
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

    def row_tokens(self, rows: int, slots: int) -> list[int]:
        """Count the tokens that each of `rows` rows has seen, dropped ones included and pads not.

        Args:
            rows: how many rows the batch has.
            slots: how many slots the layer has.
        """
        seen = self.seen(slots)
        pads = [0] * rows if self.pads is None else self.pads.tolist()
        removed = (each.tokens - self.removed_tokens for each in self.removed_spans_of(rows))
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

    def without(self, spans: Sequence[Spans], stays: Tensor) -> Self:
        """Return the map of the slots that are left when each row drops its spans.

        The tokens of these spans are no columns any more.

        Args:
            spans: what each row drops, in positions.
            stays: (B, H, S) bool, which slots hold a token that is left.
        """
        rows, slots, device = len(spans), stays.shape[-1], stays.device
        removed_spans = [
            before.union(more)
            for before, more in zip(self.removed_spans_of(rows), spans, strict=True)
        ]
        tokens = self.row_tokens(rows, slots)
        left = torch.tensor(
            [own - each.tokens for own, each in zip(tokens, removed_spans, strict=True)]
        )
        columns = int(left.max())
        pads = (columns - left).to(device)
        moved = replace(
            self,
            removed_spans=_padded(removed_spans).to(device),
            removed_tokens=self.seen(slots) - columns,
            pads=pads if bool(pads.any()) else None,
        )
        if self.kept is None:
            return moved
        positions = self.positions_of(self.columns(slots, device))
        left_slots = ops.kept_indices(stays)
        starts, stops = moved.removed_spans.unbind(dim=-1)  # type: ignore[union-attr] # just made
        ranks = positions - _sum_up_to(positions, starts, (stops - starts).cumsum(-1))
        places = (ranks + pads[:, None, None]).gather(2, left_slots.clamp(min=0))
        return moved.chosen(places.masked_fill(left_slots < 0, -1), columns)

    def removed_among_last(self, tokens: int, slots: int) -> list[int]:
        """Count for each row how many of its last tokens it was told to drop.

        Args:
            tokens: how many of the last tokens to look at.
            slots: how many slots the layer has.

        Returns:
            One number per row, or a single 0 if no row was told to drop anything.
        """
        if self.removed_spans is None:
            return [0]
        own = self.row_tokens(len(self.removed_spans), slots)
        removed_spans = self.removed_spans_of(len(own))
        return [
            each.tokens - each.among_first(max(0, seen - tokens))
            for seen, each in zip(own, removed_spans, strict=True)
        ]

    def without_last(self, tokens: int, slots: int) -> tuple[Self, int]:
        """Forget what the rows were told to drop of the last tokens, the same number in every row.

        Args:
            tokens: how many of the last tokens to look at.
            slots: how many slots the layer has.

        Returns:
            The map without it, and how many of these tokens are columns.
        """
        if self.removed_spans is None:
            return self, tokens
        own = self.row_tokens(len(self.removed_spans), slots)
        count = self.removed_among_last(tokens, slots)[0]
        left = _padded(
            [
                each.without(Spans(((max(0, seen - tokens), seen),)))
                for seen, each in zip(own, self.removed_spans_of(len(own)), strict=True)
            ]
        ).to(self.removed_spans.device)
        kept_spans = replace(self, removed_spans=left, removed_tokens=self.removed_tokens - count)
        return kept_spans, tokens - count


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


def _sum_up_to(places: Tensor, begins: Tensor, sums: Tensor) -> Tensor:
    """Of each (B, H, S) place the last of (B, N) sums whose ascending begin it reaches, or 0."""
    reached = torch.searchsorted(begins.contiguous(), places.flatten(1).contiguous(), right=True)
    return torch.nn.functional.pad(sums, (1, 0)).gather(1, reached).view_as(places)


def _padded(spans: Sequence[Spans]) -> Tensor:
    """(B, N, 2) int64: the spans of every row, empty ones in front of them."""
    most = max(len(each.parts) for each in spans)
    rows = [((0, 0),) * (most - len(each.parts)) + each.parts for each in spans]
    return torch.tensor(rows, dtype=torch.int64).view(len(spans), most, 2)
