"""A budget that all layers share, spent while these are read one after the other.

Of a prompt a row keeps its N best entries, N being what the heads of all layers keep together. What
is not among the N best of the layers read so far cannot be among those of all, so it goes: at most
2 N entries and one layer are held, and the work is linear in what was read. It is exact: of equal
scores the earlier layer, head and position wins, whenever entries go.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from snapkv import ops
from snapkv.cache.layer import CompressedLayer
from snapkv.errors import UnsupportedModelError
from snapkv.policies import AcrossLayers, PromptLayer, Selection
from snapkv.policies.states import LEAST_VOTES


class SharedBudget:
    """What the layers of one prompt hold while it is read; `once` as in `Reading.end_prompt`."""

    def __init__(self, policy: AcrossLayers, first: PromptLayer, *, once: bool) -> None:
        self._policy, self._even = policy, policy.even_counts(first)
        self._parts: list[_Part] = []
        self._heads: list[int] = []  # of every layer so far
        self._held_entries = 0  # of a row, at most
        self._has_chosen = once

    @torch.no_grad()
    def take(self, layer: CompressedLayer, prompt: PromptLayer) -> None:
        """A layer has read the prompt; after the last one all hold what they keep."""
        self._even[prompt.depth] = self._policy.even_counts(prompt)[prompt.depth]
        scores = self._scores(prompt)
        layer.note_end(prompt, layer.columns)
        self._heads.append(scores.shape[1])
        self._parts.append(_Part.of(layer, scores, self._policy.votes_at_stake(prompt)))
        self._held_entries += scores.shape[1] * scores.shape[2]
        entries = self._entries(prompt)
        is_last = prompt.depth == prompt.num_layers - 1
        if is_last or self._held_entries > 2 * max(entries):
            self._prune(entries)
        if is_last:
            for part in self._parts:
                part.end(prompt.keys.shape[2])

    def _scores(self, prompt: PromptLayer) -> Tensor:
        """(B, H, T): what decides; rows with no room beside the sinks split it evenly."""
        ranked, sinks = self._policy.ranked(prompt), self._policy.policy.sink_tokens
        for row, counts in enumerate(zip(*self._even, strict=True)):
            if min(counts) <= sinks:
                window = min(prompt.row_lengths[row], self._policy.policy.window_size)
                best = ops.best_of(ranked[row : row + 1], [counts[prompt.depth] + window])[0]
                is_dropped = ~best & (ranked[row] > -math.inf)
                ranked[row] = ranked[row].masked_fill(is_dropped, -math.inf)
                self._has_chosen = self._has_chosen or bool(is_dropped.any())
        return ranked

    def _entries(self, prompt: PromptLayer) -> list[int]:
        """B numbers: N, what a row keeps in all layers, its window included.

        Layers to come have as many heads as the first one, or fewer.
        """
        if self._heads[-1] > self._heads[0]:
            raise UnsupportedModelError(
                "model: expected no more heads in a layer than in the first where layers share a "
                f"budget, got {self._heads[0]} and {self._heads[-1]}; use SnapKV or AdaKV"
            )
        policy, seen = self._policy.policy, len(self._heads)
        heads = self._heads + [self._heads[0]] * (prompt.num_layers - seen)
        room = (policy.most_tokens or 0) - policy.window_size  # of layers that may hold more
        most = [[max(count, room) for count in counts] for counts in self._even[seen:]]
        counts = self._even[:seen] + most
        windows = [min(own, policy.window_size) for own in prompt.row_lengths]
        return [
            sum(each * (count + window) for each, count in zip(heads, own, strict=True))
            for window, own in zip(windows, zip(*counts, strict=True), strict=True)
        ]

    def _prune(self, entries: list[int]) -> None:
        """Hold the best so many of each row."""
        device = self._parts[0].scores.device
        scores = torch.cat([part.scores.flatten(1).to(device) for part in self._parts], dim=1)
        is_entry = scores > -math.inf
        best = ops.best_of(scores[:, None], entries)[:, 0] & is_entry
        self._held_entries = max(entries)
        self._has_chosen = self._has_chosen or bool((best != is_entry).any())
        if not self._has_chosen:
            return
        sizes = [part.scores[0].numel() for part in self._parts]
        for part, stays in zip(self._parts, torch.split(best, sizes, dim=1), strict=True):
            part.keep(stays.view_as(part.scores).to(part.scores.device))


@dataclass(kw_only=True)
class _Part:
    """What one layer holds so far.

    Attributes:
        scores: (B, H, K) float32, of each of its slots; minus infinity where one holds no token.
        votes: (2, B, H, K) float32, see `snapkv.policies.states.VotesAtStake`; None without votes.
        all_votes: (B, H) float32, the sum of the prompt's.
        lost, peak: (B, H) float32, the sum of those that were dropped, and the highest lifted one.
    """

    layer: CompressedLayer
    scores: Tensor
    votes: Tensor | None
    all_votes: Tensor
    lost: Tensor
    peak: Tensor

    @classmethod
    def of(
        cls, layer: CompressedLayer, scores: Tensor, votes: tuple[Tensor, Tensor] | None
    ) -> "_Part":
        """The whole layer."""
        none, held = scores.new_zeros(scores.shape[:2]), None
        if votes is not None:
            held = F.pad(torch.stack(votes), (0, scores.shape[2] - votes[0].shape[2]))
        all_votes = none if held is None else held[0].sum(dim=-1)
        return cls(
            layer=layer, scores=scores, votes=held, all_votes=all_votes, lost=none, peak=none
        )

    def keep(self, stays: Tensor) -> None:
        """Hold only some slots, (B, H, K) bool."""
        selection = Selection.of_mask(stays, per_head_budget=stays.shape[1] > 1)
        slots = selection.keep_indices
        self.layer.keep(selection, self.layer.columns)
        if self.votes is not None:
            dropped = self.votes.masked_fill(stays, 0.0)
            self.lost = self.lost + dropped[0].sum(dim=-1)
            self.peak = self.peak.maximum(dropped[1].amax(dim=-1))
            of_both = slots.clamp(min=0).expand(2, *slots.shape)
            self.votes = self.votes.gather(-1, of_both).masked_fill(slots < 0, 0.0)
        self.scores = self.scores.gather(-1, slots.clamp(min=0)).masked_fill(slots < 0, -math.inf)

    def end(self, prompt_tokens: int) -> None:
        """Note what was lost, and store as it is done behind a prompt of so many tokens."""
        layer = self.layer
        layer.finalize(prompt_tokens if layer.slots.kept is None else layer.slots.chosen_slots)
        if self.votes is not None and layer.slots.is_compressed:
            mass = self.lost / self.all_votes.clamp(min=LEAST_VOTES)
            layer.notes = replace(layer.notes, lost_mass=mass, lost_peak=self.peak)
