"""A budget that all layers share, spent while these are read one after the other.

Of a prompt a row keeps its N best entries, N being what the heads of all layers keep together. What
is not among the N best of the layers read so far cannot be among those of all, so it goes: at most
2 N entries and one layer are held, and the work is linear in what was read. It is exact: of equal
scores the earlier layer, head and position wins, whenever entries go.
"""

import math
import operator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from snapkv.cache.layer import CompressedLayer
from snapkv.errors import UnsupportedModelError
from snapkv.policies import AcrossLayers, PromptLayer, Selection
from snapkv.policies.across_layers import best_of_layers
from snapkv.policies.states import LEAST_VOTES


class SharedBudget:
    """What a prompt's layers hold while it is read; `once` as in `PromptState.end_prompt`."""

    def __init__(self, policy: AcrossLayers, first: PromptLayer, *, once: bool) -> None:
        self._policy, self._once = policy, once
        self._even = [policy.even_counts(first, depth) for depth in range(first.num_layers)]
        self._parts: list[_Part] = []
        self._tokens = 0  # of all rows and heads
        self._whole = 0  # from which layer on nothing has gone

    @torch.no_grad()
    def take(self, layer: CompressedLayer, prompt: PromptLayer) -> None:
        """A layer has read the prompt; after the last one all hold what they keep."""
        if self._parts:
            self._even[prompt.depth] = self._policy.even_counts(prompt, prompt.depth)
        scores = self._policy.ranked(prompt, self._even)
        self._parts.append(_Part.of(layer, scores, self._policy.votes_at_stake(prompt)))
        entries = self._entries(prompt.num_layers)
        layer.note_end(prompt, layer.columns)
        self._tokens += scores.shape[1] * sum(prompt.row_lengths)
        is_last = prompt.depth == prompt.num_layers - 1
        held = [part.entries for part in self._parts]
        if is_last or sum(held) > 2 * max(entries):
            self._prune(entries, held, is_last=is_last)
        if is_last:
            for part in self._parts:
                part.end(prompt.keys.shape[2])

    def _entries(self, num_layers: int) -> list[int]:
        """B numbers: N, what a row keeps in all layers.

        Layers to come have as many heads as the first one, or fewer, and may hold more tokens.
        """
        heads = [part.scores.shape[1] for part in self._parts]
        if heads[-1] > heads[0]:
            raise UnsupportedModelError(
                "model: expected no more heads in a layer than in the first where layers share a "
                f"budget, got {heads[0]} and {heads[-1]}; use SnapKV or AdaKV"
            )
        seen, most = len(heads), self._policy.policy.most_tokens or 0
        to_come = [[max(count, most) for count in counts] for counts in self._even[seen:]]
        heads += heads[:1] * (num_layers - seen)
        rows = zip(*self._even[:seen], *to_come, strict=True)
        return [sum(map(operator.mul, heads, counts)) for counts in rows]

    def _prune(self, entries: list[int], held: list[int], *, is_last: bool) -> None:
        """Hold the best so many of each row, in the layers of which nothing has gone.

        In the others, too, after the last one, or where all would be more than twice as many.
        """
        best = best_of_layers([part.scores for part in self._parts], entries)
        counts = [stays.sum(dim=-1).flatten().to(best[0].device) for stays in best]
        kept = torch.cat(counts).cpu()  # waited for once
        if not self._once and int(kept.sum()) == self._tokens:
            return
        split = torch.split(kept, [len(each) for each in counts])
        of_parts = [own.view(stays.shape[:2]) for own, stays in zip(split, best, strict=True)]
        left = [int(own.sum(dim=1).max()) for own in of_parts]
        since = self._whole
        if is_last or sum(held[:since]) + sum(left[since:]) > 2 * max(entries):
            since = 0
        for place in range(since, len(self._parts)):
            self._parts[place].keep(best[place], of_parts[place], left[place], is_last=is_last)
        self._whole = len(self._parts)


@dataclass(kw_only=True)
class _Part:
    """What one layer holds so far.

    Attributes:
        scores: (B, H, K) float32, of each of its slots; minus infinity where one holds no token.
        votes: (2, B, H, K) float32, see `snapkv.policies.states.VotesAtStake`; None without votes.
        all_votes: (B, H) float32, the sum of the prompt's.
        lost, peak: (B, H) float32, the sum of those that were dropped, and the highest lifted one.
        entries: slots of a row that hold a token, at most.
    """

    layer: CompressedLayer
    scores: Tensor
    votes: Tensor | None
    all_votes: Tensor
    lost: Tensor
    peak: Tensor
    entries: int

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
            layer=layer,
            scores=scores,
            votes=held,
            all_votes=all_votes,
            lost=none,
            peak=none,
            entries=scores.shape[1] * scores.shape[2],
        )

    def keep(self, stays: Tensor, counts: Tensor, entries: int, *, is_last: bool) -> None:
        """Hold only some slots, (B, H, K) bool, so many of each head, (B, H), not on the device.

        After the last layer nobody asks for their scores any more.
        """
        selection = Selection.of_mask(stays, counts, per_head_budget=stays.shape[1] > 1)
        self.entries = entries
        self.layer.keep(selection, self.layer.columns)
        if self.votes is not None:
            dropped = self.votes.masked_fill(stays, 0.0)
            self.lost = self.lost + dropped[0].sum(dim=-1)
            self.peak = self.peak.maximum(dropped[1].amax(dim=-1))
        if is_last:
            return
        slots, none = selection.keep_indices.clamp(min=0), selection.keep_indices < 0
        if self.votes is not None:
            of_both = slots.expand(2, *slots.shape)
            self.votes = self.votes.gather(-1, of_both).masked_fill_(none, 0.0)
        self.scores = self.scores.gather(-1, slots).masked_fill_(none, -math.inf)

    def end(self, prompt_tokens: int) -> None:
        """Note what was lost, and store as it is done behind a prompt of so many tokens."""
        layer = self.layer
        layer.finalize(prompt_tokens if layer.slots.kept is None else layer.slots.chosen_slots)
        if self.votes is not None and layer.slots.is_compressed:
            mass = self.lost / self.all_votes.clamp(min=LEAST_VOTES)
            layer.state = replace(layer.state, lost_mass=mass, lost_peak=self.peak)
