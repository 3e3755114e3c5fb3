"""What is noted of a layer's tokens beside their keys and values."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from snapkv.cache.paging import PageTable
from snapkv.cache.rows import RowRecord, per_row
from snapkv.policies.states import LostVotes


@dataclass(frozen=True, kw_only=True)
class DecodeNotes(RowRecord):
    """Notes of one layer; a field that is added here follows rows, crops, bytes and files.

    Attributes:
        slot_scores: (B, H, S) float32, what an evicting policy has noted of every slot.
        head_notes: (B, H, N) int64, what an evicting policy has noted of every head.
        token_ids: (B, N) int64, of the prompt as far as it has been read, then of the last step;
            for a policy that looks at tokens.
        last_queries: (B, Hq, N, D), those that the observation window may need; see
            `snapkv.cache.last_queries`.
        sink_keys: (B, H, start, D), the keys of attention sinks that have been moved on as they
            were before; the store holds them as they are now.
        sinks_moved: (B, 1, 1, 1) bool, whether a row's sinks stand at other positions than their
            own.
        lost_mass: (B, H) float32, see `LostVotes`; None where nothing was dropped, or nobody knows.
        lost_peak: (B, H) float32, likewise.
        pages: the evicted tokens in pages, where each step chooses among them. A file need not have
            what the offloaded keys say.
    """

    slot_scores: Tensor | None = per_row(slot_axis=2)
    head_notes: Tensor | None = per_row()
    token_ids: Tensor | None = per_row(token_axis=1)
    last_queries: Tensor | None = per_row(token_axis=2)
    sink_keys: Tensor | None = per_row()
    sinks_moved: Tensor | None = per_row()
    lost_mass: Tensor | None = per_row(measured=True)
    lost_peak: Tensor | None = per_row(measured=True)
    pages: PageTable | None = per_row(saved=False)

    def scores_with(self, new_tokens: int) -> Tensor | None:
        """(B, H, S) float32: `slot_scores`, zero for the new tokens behind them."""
        if self.slot_scores is None:
            return None
        return torch.nn.functional.pad(self.slot_scores, (0, new_tokens))

    def of_choice(self, last_queries: Tensor | None, lost: LostVotes | None) -> Self:
        """Behind the end of a prompt, with the queries to hold and the votes that were lost."""
        mass, peak = (None, None) if lost is None else (lost.mass, lost.peak)
        return replace(self, last_queries=last_queries, lost_mass=mass, lost_peak=peak)
