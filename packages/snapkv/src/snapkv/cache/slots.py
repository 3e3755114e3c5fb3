"""Which token is in which KV cache slot, and what else a layer remembers about its tokens.

A slot is an index into the stored keys and values. A column is an index into all tokens that the
layer has seen, padding included, except those that the user dropped. A position is the index of a
token in the text of its row: it does not count padding, and it does count dropped tokens. Positions
are computed in this module only.
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
"""A number of tokens or slots: an int, or a tensor while the device counts recorded steps."""


@dataclass(frozen=True, kw_only=True)
class SlotMap(RowRecord):
    """An immutable map from the slots of a layer's store to the tokens that they hold.

    The first slots hold the tokens that were selected from a prompt, and the other slots hold every
    token after it. The map stays the same while tokens are appended. As long as nothing has been
    evicted, slots and columns are the same.

    Attributes:
        start: the column of the first token after those that were selected from.
        kept: (B, H, K) int32, the columns of the tokens in the first K slots, -1 for an empty slot;
            None if nothing has been evicted.
        pads: (B,) int64, how many leading columns of each row are padding, or None for none.
        padding_slots: (B,) int64, how many leading slots of each row are empty, or None for none.
        chosen_at: how many tokens had been seen when the layer last selected what it keeps; 0
            before the end of the first prompt.
        removed_spans: (B, N, 2) int64, half-open spans of positions that the user dropped from each
            row, in ascending order after empty spans; None if nothing was dropped. Dropped tokens
            have no columns.
        removed_tokens: how many tokens were seen but have no column, which is the smallest number
            over the rows. A row that has dropped more has padding in their place.
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
        """The number of slots for the tokens that were selected from a prompt, empty ones too."""
        return 0 if self.kept is None else self.kept.shape[-1]

    @functools.cached_property
    def evicted_tokens(self) -> int:
        """The number of columns that were selected from, minus the number of `chosen_slots`.

        This is how many tokens a head has evicted if it has neither padding nor empty slots.
        """
        return self.start - self.chosen_slots

    @functools.cached_property
    def is_compressed(self) -> bool:
        """Whether a prompt was read to its end and some of its tokens were evicted."""
        return self.kept is not None and self.chosen_at > 0

    def kept_slots(self, prompt_tokens: int) -> int:
        """Return how many slots a prompt of `prompt_tokens` tokens takes after its compression."""
        return prompt_tokens if self.kept is None else self.chosen_slots

    def count_columns(self, slots: Count) -> Count:
        """Count the columns of a layer that has `slots` slots."""
        return self.start + slots - self.chosen_slots

    def count_seen(self, slots: Count) -> Count:
        """Count the tokens that a layer with `slots` slots has seen.

        Args:
            slots: an int, or a tensor if the device counts. The result has the same type.
        """
        return self.removed_tokens + self.count_columns(slots)

    @property
    def leading_padding(self) -> Tensor | None:
        """The number of leading slots in each row that hold no token.

        Shape: (B,) int64; None if there are none.
        """
        return self.pads if self.kept is None else self.padding_slots

    @functools.cached_property
    def hidden_slots(self) -> Tensor | None:
        """The `leading_padding`, (B,) int64, or None if it is zero in every row."""
        # Reading the tensor waits for the device, so the result is cached.
        padding = self.leading_padding
        return padding if padding is not None and bool(padding.any()) else None

    # Which tokens are stored.

    def columns(self, slots: int, device: torch.device) -> Tensor:
        """Return the column of the token in each of `slots` slots.

        Args:
            slots: how many slots the layer has, S.
            device: the device of the result.

        Returns:
            (B, H, S) int64 on `device`, negative for an empty slot. If nothing has been evicted,
            (1, 1, S), because the columns are the same in all rows and heads.
        """
        later = torch.arange(self.start, self.count_columns(slots), device=device)
        if self.kept is None:
            return later[None, None]
        return torch.cat([self.kept.long(), later.expand(*self.kept.shape[:2], -1)], dim=-1)

    def columns_of(self, indices: Tensor, slots: int) -> Tensor:
        """Return the columns of the tokens in some slots.

        Args:
            indices: (B, H', K) int64, the slots; -1 for none, which stays -1. H' is H, or a
                multiple of it if each query head keeps tokens of its own.
            slots: how many slots the layer has.

        Returns:
            (B, H', K) integers.
        """
        if self.kept is None:
            return indices
        is_all_chosen = slots == self.chosen_slots
        columns = self.kept if is_all_chosen else self.columns(slots, self.kept.device)
        if indices.shape[1] > columns.shape[1]:
            columns = columns.repeat_interleave(indices.shape[1] // columns.shape[1], dim=1)
        return columns.gather(2, indices.clamp(min=0)).masked_fill(indices < 0, -1)

    def positions_of(self, columns: Tensor) -> Tensor:
        """Return the positions of the tokens in some columns.

        Args:
            columns: (B, H, S) integers.

        Returns:
            (B, H, S) integers, -1 for padding.
        """
        ranks = columns if self.pads is None else columns - self.pads[:, None, None]
        ranks = ranks.clamp(min=-1)
        if self.removed_spans is None:
            return ranks
        lengths = self.removed_spans[..., 1] - self.removed_spans[..., 0]
        sums = lengths.cumsum(-1)
        after = self.removed_spans[..., 0] - (sums - lengths)  # rank of the token after each span
        return ranks + _sum_up_to(ranks, after, sums)

    def visible_columns(self, columns: int, rows: int, device: torch.device) -> Tensor:
        """Return a mask of the first `columns` columns that hides padding.

        Returns:
            (rows, columns) bool on `device`. Tokens that are yet to be read count as tokens, and
            tokens that every row has dropped count as padding in front.
        """
        first = torch.full((rows, 1), self.removed_tokens, device=device)
        if self.pads is not None:
            first = first + self.pads[:, None]
        return torch.arange(columns, device=device) >= first

    def rows_without_evictions(self) -> Tensor:
        """Return a mask of the rows that still hold all their tokens in every head.

        The layer must have evicted tokens.

        Returns:
            (B,) bool.
        """
        assert self.kept is not None
        columns = torch.arange(self.evicted_tokens, self.start, device=self.kept.device)
        pads = self.kept.new_zeros(len(self.kept)) if self.pads is None else self.pads
        is_held = (self.kept == columns) | (columns < pads[:, None, None])
        return is_held.flatten(1).all(dim=1) & (pads >= self.evicted_tokens)

    def count_unbroken_tail(self, slots: int) -> int:
        """Return how many of the last tokens are stored by every head of every row without a gap.

        The layer must have evicted tokens. One stored token is not counted, because a crop must
        leave a token in front of the tokens that it removes.

        Args:
            slots: how many slots the layer has.
        """
        assert self.kept is not None
        columns, end = self.columns(slots, self.kept.device), self.count_columns(slots)
        last = torch.arange(end - columns.shape[-1], end, device=columns.device)
        whole = (columns == last).flip(-1).cumprod(dim=-1).sum(dim=-1)
        pads = 0 if self.pads is None else self.pads[:, None, None]
        held = (columns >= pads).sum(dim=-1)
        return int(whole.minimum(held - 1).min())

    def evicted_by_row(self) -> Tensor:
        """Count the tokens that each row has evicted. Padding is not counted.

        The layer must have evicted tokens, and all heads of a row must hold the same number of
        them.

        Returns:
            (B,) int64.
        """
        assert self.kept is not None
        dropped = torch.full(self.kept.shape[:1], self.evicted_tokens, device=self.kept.device)
        if self.pads is not None:
            dropped = dropped - self.pads
        return dropped if self.padding_slots is None else dropped + self.padding_slots

    # Changing the map.

    def with_kept(self, kept: Tensor, columns: int, **changes: Any) -> Self:
        """Return the map of a layer that keeps only some of its first columns.

        Args:
            kept: (B, H, K) integers, the columns to keep; -1 for an empty slot.
            columns: the number of columns from which they were selected. All later columns stay.
            **changes: new values for other fields.
        """
        return replace(self, kept=kept.to(torch.int32), start=columns, **changes)

    def without_evictions(self) -> Self:
        """Return the map of a layer that stores every column, as if nothing had been evicted."""
        return replace(self, kept=None, start=0, padding_slots=None)

    def without_padding(self) -> Self:
        """Return the map in which padding slots are marked as empty, as a ragged store needs it."""
        if self.padding_slots is None or self.kept is None:
            return self
        slots = torch.arange(self.chosen_slots, device=self.kept.device)
        is_padding = slots < self.padding_slots[:, None, None]
        return replace(self, kept=self.kept.masked_fill(is_padding, -1), padding_slots=None)

    def cropped(self, tokens: int, slots: int) -> Self:
        """Return the map after the last `tokens` tokens were removed.

        Args:
            tokens: how many tokens were removed.
            slots: how many slots are left.
        """
        seen, columns = self.count_seen(slots), self.count_columns(slots)
        if columns and slots >= self.chosen_slots and self.chosen_at <= seen:
            return self
        return replace(
            super().cropped(tokens, slots),
            start=min(self.start, columns),
            pads=None if self.pads is None or not columns else self.pads.clamp(max=columns),
            chosen_at=min(self.chosen_at, seen),
        )

    # Spans that the user drops.

    def row_tokens(self, rows: int, slots: int) -> list[int]:
        """Count the tokens that each row has seen. Dropped tokens count, and padding does not.

        Args:
            rows: how many rows the batch has.
            slots: how many slots the layer has.
        """
        seen = self.count_seen(slots)
        pads = [0] * rows if self.pads is None else self.pads.tolist()
        removed = (each.tokens - self.removed_tokens for each in self.removed_spans_of(rows))
        return [seen - own_pads + more for own_pads, more in zip(pads, removed, strict=True)]

    @property
    def mean_dropped_tokens(self) -> float:
        """The average number of tokens that the user has dropped from a row."""
        if self.removed_spans is None:
            return 0
        return float(
            (self.removed_spans[..., 1] - self.removed_spans[..., 0]).sum(dim=-1).float().mean()
        )

    def removed_spans_of(self, rows: int) -> list[Spans]:
        """Return the spans that the user has dropped, for each of `rows` rows."""
        if self.removed_spans is None:
            return [Spans(())] * rows
        return [
            Spans(tuple((start, stop) for start, stop in row if start < stop))
            for row in self.removed_spans.tolist()
        ]

    def without_spans(self, spans: Sequence[Spans], stays: Tensor) -> Self:
        """Return the map of the slots that remain after each row has dropped its spans.

        The dropped tokens have no columns in the new map.

        Args:
            spans: the positions that each row drops.
            stays: (B, H, S) bool, which slots hold a token that remains.
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
            removed_tokens=self.count_seen(slots) - columns,
            pads=pads if bool(pads.any()) else None,
        )
        if self.kept is None:
            return moved
        positions = self.positions_of(self.columns(slots, device))
        left_slots = ops.kept_indices(stays)
        starts, stops = moved.removed_spans.unbind(dim=-1)  # type: ignore[union-attr] # just made
        ranks = positions - _sum_up_to(positions, starts, (stops - starts).cumsum(-1))
        places = (ranks + pads[:, None, None]).gather(2, left_slots.clamp(min=0))
        return moved.with_kept(places.masked_fill(left_slots < 0, -1), columns)

    def removed_among_last(self, tokens: int, slots: int) -> list[int]:
        """Count how many of the last tokens of each row the user has dropped.

        Args:
            tokens: how many of the last tokens to look at.
            slots: how many slots the layer has.

        Returns:
            One number per row, or a single 0 if no row has dropped anything.
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
        """Return the map without the dropped spans among the last tokens, which will be removed.

        The caller must have checked that every row has dropped the same number of these tokens.

        Args:
            tokens: how many of the last tokens will be removed.
            slots: how many slots the layer has.

        Returns:
            The map without these spans, and how many of the last tokens still have a column.
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
    """Other tensors that a layer remembers about its tokens.

    A field that is added here is also reordered, cropped and saved with the cache.

    Attributes:
        slot_scores: (B, H, S) float32, the score that an evicting policy has given to every slot.
        head_notes: (B, H, N) int64, what an evicting policy has stored about every head.
        token_ids: (B, N) int64, the ids of the prompt's tokens read so far; after the prompt, those
            of the last decode step.
        sink_keys: (B, H, sinks, D), the keys of the attention sinks before they were rotated to
            other positions. The store holds the rotated keys.
        sinks_moved: (B, 1, 1, 1) bool, whether the sinks of a row have been moved.
        lost_mass: (B, H) float32, see `LostVotes`; None if it is not known.
        lost_peak: (B, H) float32, see `LostVotes`; None if it is not known.
    """

    slot_scores: Tensor | None = per_row(slot_axis=2)
    head_notes: Tensor | None = per_row()
    token_ids: Tensor | None = per_row(token_axis=1)
    sink_keys: Tensor | None = per_row(is_counted=False)
    sinks_moved: Tensor | None = per_row()
    lost_mass: Tensor | None = per_row(is_counted=False)
    lost_peak: Tensor | None = per_row(is_counted=False)

    def scores_with(self, new_tokens: int) -> Tensor | None:
        """Return `slot_scores`, followed by a score of zero for each new token.

        Returns:
            (B, H, S + new_tokens) float32, or None if there are no scores.
        """
        if self.slot_scores is None:
            return None
        return torch.nn.functional.pad(self.slot_scores, (0, new_tokens))


def _sum_up_to(places: Tensor, begins: Tensor, sums: Tensor) -> Tensor:
    """Look up a sum for each place: the one of the last entry in `begins` that is not after it.

    Args:
        places: (B, H, S) integers.
        begins: (B, N) integers, ascending.
        sums: (B, N) integers, one for each of the `begins`.

    Returns:
        (B, H, S) integers, 0 for a place before the first entry of `begins`.
    """
    reached = torch.searchsorted(begins.contiguous(), places.flatten(1).contiguous(), right=True)
    return torch.nn.functional.pad(sums, (1, 0)).gather(1, reached).view_as(places)


def _padded(spans: Sequence[Spans]) -> Tensor:
    """Convert the spans of all rows into one tensor, with empty spans in front of shorter rows.

    Returns:
        (B, N, 2) int64 on the CPU, where N is the largest number of spans in a row.
    """
    most = max(len(each.parts) for each in spans)
    rows = [((0, 0),) * (most - len(each.parts)) + each.parts for each in spans]
    return torch.tensor(rows, dtype=torch.int64).view(len(spans), most, 2)
