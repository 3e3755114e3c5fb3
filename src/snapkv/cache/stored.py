"""What one layer holds: of which tokens, in which slots, at what cost."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from snapkv.cache.growing import Growing
from snapkv.cache.parked import ParkedTokens
from snapkv.cache.ragged import RaggedStates
from snapkv.cache.sinks import MovedSinks


class StoredTokens(DynamicLayer):
    """Keys and values of some of the tokens a layer has seen, and questions about them.

    Attributes:
        masks_of_the_model: whether attention is hidden from pads by the model's own masks alone.
        keys, values: (B, H, S, D), S stored slots. H is Hkv, or Hq where a policy keeps one set
            per query head.
        cumulative_length: tokens seen since the last reset.
        kept: (B, H, K) int32, prompt columns of the first K slots, or None while nothing was
            dropped.
        held: whether the prompt is still coming in and a part of it has been dropped already.
        pad_tokens: (B,) leading pads of each row of the prompt, or None.
        gaps: (B, seen tokens) bool, the pads behind a row's first token: its turn was shorter than
            others of the batch, or its answer ended early. None where there are none.
        filler_tokens: (B,) leading slots that hold pads, or None.
        ragged: what the heads keep where each keeps a number of its own; `keys` and `values` then
            hold only what came behind the prompt, or, for an evicting policy, since the last step.
        slot_scores: (B, H, S) float32, what an evicting policy has noted of every slot, or None.
        head_notes: (B, H, N) int64, what an evicting policy has noted of every head, or None.
        token_ids: (B, N) int64, of the prompt as far as it has been read, then of the last step; or
            None, for a policy that does not look at them.
        sinks: the keys of tokens that have been moved on as they were before, or None; `keys` holds
            them as they are now.
        parked: all tokens of the turns so far, off the device; None where dropped is dropped.
        hides_more_than_padding: attention needs a mask of the layer's own.
    """

    keys: Any  # None until the first update
    values: Any

    _chooses_again = True
    masks_of_the_model = False

    def __init__(self) -> None:
        super().__init__()
        self.cumulative_length = 0
        self.kept: Tensor | None = None
        self.held = False
        self.pad_tokens: Tensor | None = None
        self.gaps: Tensor | None = None
        self.filler_tokens: Tensor | None = None
        self._hidden_slots: tuple[Tensor, bool] | None = None
        self.hides_more_than_padding = False
        self.ragged: RaggedStates | None = None
        self.slot_scores: Tensor | None = None
        self.head_notes: Tensor | None = None
        self.token_ids: Tensor | None = None
        self.sinks: MovedSinks | None = None
        self.parked: ParkedTokens | None = None
        self._query_tail: Tensor | None = None
        self._num_kv_heads = 0
        self._grows_in_place = True
        self._growing = Growing()

    def _append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens behind the others; returns all keys and values."""
        if not (self._grows_in_place and self._is_filled and self.ragged is None):
            keys, values = super().update(keys, values)
            return keys, values
        grown = self._growing.append(self.keys, self.values, keys, values)
        self.keys, self.values = grown
        return grown

    @property
    def _is_filled(self) -> bool:
        """Whether any token was ever appended since the last reset."""
        return bool(self.is_initialized and self.keys.ndim == 4)

    @property
    def stored_tokens(self) -> int:
        """S: slots of `keys`, the same for every head and row."""
        return self.keys.shape[-2] if self._is_filled else 0

    def _dropped_tokens(self) -> Tensor:
        """(B,) int64: tokens of each row that have been seen and are not stored; pads are none."""
        gap = self.cumulative_length - self.stored_tokens
        dropped = torch.full((self.keys.shape[0],), gap, device=self.keys.device)
        if self.pad_tokens is not None:
            dropped = dropped - self.pad_tokens
        if self.gaps is not None:
            hidden = (~self.visible_slots(self.stored_tokens)).sum(dim=-1)
            return dropped - self.gaps.sum(dim=-1) + hidden
        return dropped if self.filler_tokens is None else dropped + self.filler_tokens

    def scores_with(self, new_tokens: int) -> Tensor | None:
        """(B, H, S) float32: what was noted of every slot, zero for the last `new_tokens`."""
        if self.slot_scores is None:
            return None
        return torch.nn.functional.pad(self.slot_scores, (0, new_tokens))

    def _fillers_outnumber_padding(self, seen_tokens: int) -> bool:
        """Whether the padding mask, shifted to the stored slots, hides too few of them.

        The stored slots stand for the last columns seen. Where every row keeps the same budget,
        exactly its fillers then fall on columns of pads. Rows with budgets of their own (a ratio
        of their own length), or that evict at times of their own, can hold more fillers than that.
        Pads between turns stand in other slots of every layer that has dropped something.
        """
        if self.gaps is not None:
            return True
        if self.filler_tokens is None or self.kept is None:
            return False
        pads = torch.zeros_like(self.filler_tokens) if self.pad_tokens is None else self.pad_tokens
        hidden = pads - (seen_tokens - self.kept.shape[-1])
        return bool((self.filler_tokens != hidden.clamp(min=0)).any())

    @property
    def holds_fillers(self) -> bool:
        """Whether any stored slot must be hidden."""
        hidden = self.pad_tokens if self.kept is None else self.filler_tokens
        if hidden is None:
            return False
        if self._hidden_slots is None or self._hidden_slots[0] is not hidden:
            self._hidden_slots = hidden, bool(hidden.any())  # once, not for every token
        return self._hidden_slots[1]

    def visible_slots(self, slots: int) -> Tensor:
        """(B, slots) bool: which of the first slots hold a token and neither a filler nor a pad."""
        order = torch.arange(slots, device=self.keys.device)
        hidden = self.pad_tokens if self.kept is None else self.filler_tokens
        visible = torch.ones(self.keys.shape[0], slots, dtype=torch.bool, device=order.device)
        if hidden is not None:
            visible = order >= hidden[:, None]
        if self.gaps is not None:
            chosen = 0 if self.kept is None else self.kept.shape[-1]
            behind = self.visible_columns(self.stored_tokens - chosen)
            visible[:, chosen:] &= behind[:, : max(0, slots - chosen)]
        return visible

    def visible_columns(self, tokens: int, drafts: int = 0) -> Tensor:
        """(B, tokens) bool: which of the last tokens seen, before so many drafts, are no pads."""
        end = self.cumulative_length - drafts
        columns = torch.arange(end - tokens, end, device=self.keys.device)
        visible = torch.ones(self.keys.shape[0], tokens, dtype=torch.bool, device=columns.device)
        if self.pad_tokens is not None:
            visible = columns >= self.pad_tokens[:, None]
        gaps = self._gaps_so_far()
        return visible if gaps is None else visible & ~gaps[:, end - tokens : end]

    def _gaps_so_far(self) -> Tensor | None:
        """`gaps` of just the tokens seen by now; those that came since it was noted are no pads."""
        if self.gaps is None:
            return None
        missing = self.cumulative_length - self.gaps.shape[1]
        return torch.nn.functional.pad(self.gaps, (0, missing))

    def note_gaps(self, gaps: Tensor | None) -> None:
        """Take the pads of all tokens seen by now; None where the new tokens are none.

        From the first on the layer needs a mask of its own.
        """
        if gaps is None and self.gaps is None:
            return
        self.gaps = self._gaps_so_far() if gaps is None else gaps
        self.hides_more_than_padding = True

    def whole_rows(self) -> list[bool]:
        """For each row of a compressed layer whether nothing of it was dropped yet.

        A short row of a padded batch fits the budget where a longer one does not. False for all
        where rows have no pads, so are of one length, and where nothing can be chosen again.
        """
        B = self.keys.shape[0]
        if self.packed_pads is None or not self._chooses_again:
            return [False] * B
        seen = self.cumulative_length - self.packed_pads
        held = (self.stored_positions() >= 0).sum(dim=-1).amin(dim=-1)
        rows: list[bool] = (held == seen).tolist()
        return rows

    @property
    def full_bytes(self) -> int:
        """Bytes of every seen token's key and value, stored once per KV head."""
        if not self._is_filled:
            return 0
        B = self.keys.shape[0]
        per_token = self.keys.element_size() * (self.keys.shape[-1] + self.values.shape[-1])
        return int(B * self._num_kv_heads * self.cumulative_length * per_token)

    @property
    def held_bytes(self) -> int:
        """Bytes of the stored keys and values, second copies included, measured on the tensors."""
        if not self._is_filled:
            return 0
        ragged = 0 if self.ragged is None else self.ragged.held_bytes
        sinks = 0 if self.sinks is None else self.sinks.keys.nbytes
        return ragged + sinks + int(self.keys.nbytes + self.values.nbytes)

    @property
    def host_bytes(self) -> int:
        """Bytes of the keys and values that are off the device."""
        return 0 if self.parked is None else self.parked.held_bytes

    @property
    def noted_bytes(self) -> int:
        """Bytes of what is held beside the keys and values, measured on the tensors."""
        noted = (
            self.kept,
            self.gaps,
            self.slot_scores,
            self.head_notes,
            self.token_ids,
            self._query_tail,
        )
        layout = 0 if self.ragged is None else self.ragged.layout.held_bytes
        return layout + sum(tensor.nbytes for tensor in noted if tensor is not None)

    @property
    def kept_tokens(self) -> float:
        """Tokens stored per row and head, on average where they differ."""
        mean = self.stored_tokens + (0 if self.ragged is None else self.ragged.mean_tokens)
        return int(mean) if mean == int(mean) else mean

    def stored_positions(self) -> Tensor:
        """(B, H, S) int64: true position of every stored token, ascending; -1 for a pad."""
        if not self._is_filled:
            return torch.empty(0, 0, 0, dtype=torch.int64)
        columns = self.columns()
        positions = columns if self.gaps is None else self._without_gaps(columns)
        if self.pad_tokens is None:
            return positions
        return (positions - self.pad_tokens[:, None, None]).clamp(min=-1)

    def packed_columns(self) -> Tensor:
        """`columns` as if every pad stood in front of its row, `packed_pads` of them."""
        if self.gaps is None:
            return self.columns()
        columns = self._without_gaps(self.columns())
        return torch.where(columns < 0, columns, columns + self.gaps.sum(dim=-1)[:, None, None])

    @property
    def packed_pads(self) -> Tensor | None:
        """(B,) int64: pads of each row, wherever they stand; None where no row has any."""
        if self.gaps is None:
            return self.pad_tokens
        pads = self.gaps.sum(dim=-1)
        return pads if self.pad_tokens is None else pads + self.pad_tokens

    def _without_gaps(self, columns: Tensor) -> Tensor:
        """The columns of slots if no pad stood behind a row's first token; -1 for a pad."""
        gaps = self._gaps_so_far()
        assert gaps is not None
        before = gaps.long().cumsum(dim=-1)[:, None].expand(-1, columns.shape[1], -1)
        is_pad = gaps[:, None].expand_as(before).gather(2, columns.clamp(min=0))
        moved = columns - before.gather(2, columns.clamp(min=0))
        return moved.masked_fill(is_pad | (columns < 0), -1)

    def columns(self) -> Tensor:
        """(B, H, S) int64: column of every stored slot in the whole sequence, pads counted."""
        B, H = self.keys.shape[:2]
        S, device, end = self.stored_tokens, self.keys.device, self.cumulative_length
        if self.kept is None:
            return torch.arange(end - S, end, device=device).expand(B, H, S).clone()
        appended = S if self.ragged is not None else S - self.kept.shape[-1]
        behind = torch.arange(end - appended, end, device=device).expand(B, H, -1)
        return torch.cat([self.kept.long(), behind], dim=-1)
