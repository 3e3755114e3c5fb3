"""A budget that all layers share, spent while these are read one after the other.

Of a prompt a row keeps its N best entries, N being what the heads of all layers keep together. What
is not among the N best of the layers read so far cannot be among those of all, so it goes: at most
2 N entries and one layer, or those of a `LayerGroup`, are held, and the work is linear in what was
read. It is exact: of equal scores the earlier layer, head and position wins, whenever entries go.

The entries of a row are listed layer by layer, one head after the other. So all layers are compared
in a few operations; on a GPU those of each layer would take longer than the work that they are.
"""

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from snapkv import ops
from snapkv.cache.layer import CompressedLayer
from snapkv.cache.layer_group import LayerGroup, encode
from snapkv.errors import UnsupportedModelError
from snapkv.policies import AcrossLayers, PromptLayer, Selection
from snapkv.policies.across_layers import best_entries
from snapkv.policies.states import LEAST_VOTES, VotesAtStake


class SharedBudget:
    """What a prompt's layers hold while it is read; `once` as in `PromptState.end_prompt`."""

    def __init__(self, policy: AcrossLayers, first: PromptLayer, *, once: bool) -> None:
        self._policy, self._once = policy, once
        self._even = [
            policy.even_counts(first.at_depth(depth)) for depth in range(first.num_layers)
        ]
        self._seen = [0 for _ in first.keys]  # what a row keeps in the layers that were read
        self._to_come = [
            _sums_from(row, policy.policy.most_tokens or 0) for row in zip(*self._even, strict=True)
        ]
        self._rows = [_Row(first.keys.device) for _ in first.keys]
        self._device = first.keys.device
        self._parts: list[_Part] = []
        self._scores: list[Tensor] = []  # (B, heads of some, T) of layers that are not listed
        self._votes: list[VotesAtStake] = []  # of the same
        self._tokens = 0  # of all rows and heads
        self._held = 0  # slots of a row, at most
        self._listed = 0  # of how many layers the entries are listed

    def take(self, group: LayerGroup) -> None:
        """Layers have read the prompt; after the last one all hold what they keep."""
        stack, rows, seen = group.stack, len(self._rows), len(self._parts)
        if seen:
            counts = self._policy.even_counts(stack)
            read = [counts[at : at + rows] for at in range(0, len(counts), rows)]
            self._even[seen : seen + len(group)] = read
        scores = self._policy.score_layer(stack, self._even)
        heads = scores.shape[1]
        self._scores.append(_side_by_side(scores, rows))
        if (votes := self._policy.votes_at_stake(stack)) is not None:
            pads = None if votes.pad_tokens is None else votes.pad_tokens[:rows]
            beside = _side_by_side(votes.votes, rows)
            self._votes.append(replace(votes, votes=beside, pad_tokens=pads))
        for layer, prompt in zip(group.layers, group.prompts, strict=True):
            assert layer.slots.is_whole
            self._parts.append(_Part(layer, heads=heads))
            layer.note_end(prompt)
        entries = self._entries(seen)
        self._tokens += heads * sum(stack.row_lengths)
        self._held += self._scores[-1][0].numel()
        if group.reaches_last or self._held > 2 * max(entries):
            self._prune(entries, is_last=group.reaches_last)
        if group.reaches_last:
            self._end(stack.keys.shape[2])

    def _entries(self, before: int) -> list[int]:
        """B numbers: N, what a row keeps in all layers, of which some more have been read.

        Layers to come have as many heads as the first one, or fewer, and may hold more tokens.
        """
        first, heads, seen = self._parts[0].heads, self._parts[-1].heads, len(self._parts)
        if heads > first:
            raise UnsupportedModelError(
                "model: expected no more heads in a layer than in the first where layers share a "
                f"budget, got {first} and {heads}; use SnapKV or AdaKV"
            )
        counts = map(sum, zip(*self._even[before:seen], strict=True))
        self._seen = [
            total + heads * count for total, count in zip(self._seen, counts, strict=True)
        ]
        totals = zip(self._seen, self._to_come, strict=True)
        return [total + first * later[seen] for total, later in totals]

    def _prune(self, entries: list[int], *, is_last: bool) -> None:
        """List the best so many of each row; layers of which nothing has gone hold only these.

        The others, too, after the last one, or where all would be more than twice as many.
        """
        since, new = self._listed, self._parts[self._listed :]
        scores = torch.cat([each.flatten(1).to(self._device) for each in self._scores], dim=1)
        tokens, heads = self._scores[0].shape[2], [part.heads for part in new]
        compared = [
            row.compare(own, [tokens] * sum(heads), total)
            for row, own, total in zip(self._rows, scores, entries, strict=True)
        ]
        kept = torch.stack([row.before for row in compared]).tolist()  # waited for once
        if not self._once and sum(before[-1] for before in kept) == self._tokens:
            return
        columns = torch.arange(tokens, dtype=torch.int32, device=self._device).repeat(sum(heads))
        votes = self._unlisted_votes(tokens)
        for at, (row, found, before) in enumerate(zip(self._rows, compared, kept, strict=True)):
            start = len(row.at)
            for part in new:
                slots = part.heads * tokens
                part.gaps.append(start - at * slots * (part.heads > 1))
                start += slots
            if votes is not None:
                row.note_lost(found.best, votes[:, at], [tokens] * sum(heads))
            row.keep(found, before, columns, heads)
        self._listed, self._scores, self._votes = len(self._parts), [], []
        left = [max(map(sum, rows)) for rows in self._counts_since(0)]
        older = self._held - scores.shape[1]
        if is_last or older + sum(left[since:]) > 2 * max(entries):
            since = older = 0
        self._held = older + sum(left[since:])
        self._let_go(since)

    def _unlisted_votes(self, tokens: int) -> Tensor | None:
        """(2, B, N) float32: votes of layers of so many tokens, and what they are lifted to."""
        if not self._votes:
            return None
        votes = VotesAtStake.joined(self._votes)
        both = torch.stack([votes.votes, votes.faded_shares()])
        return F.pad(both, (0, tokens - both.shape[-1])).flatten(2).to(self._device)

    def _let_go(self, since: int) -> None:
        """The layers from there on hold nothing but what is listed."""
        counts = self._counts_since(since)
        columns = self._columns_by_head(since, counts)
        places = zip(*(row.places(since) for row in self._rows), strict=True)
        parts = zip(self._parts[since:], columns, counts, places, strict=True)
        for part, own_columns, own_counts, own_places in parts:
            part.keep(own_columns, own_counts, own_places)

    def _counts_since(self, since: int) -> list[tuple[list[int], ...]]:
        """Of each layer from there on what the heads of each row keep."""
        return list(zip(*[row.counts[since:] for row in self._rows], strict=True))

    def _columns_by_head(self, since: int, counts: Sequence[Sequence[list[int]]]) -> list[Tensor]:
        """(B, H, K) int32 of each layer from there on: the columns its heads keep, behind -1.

        They lie in one block of memory.
        """
        shapes = [(len(rows), len(rows[0]), max(map(max, rows))) for rows in counts]
        sizes = list(map(math.prod, shapes))
        block = torch.full((sum(sizes),), -1, dtype=torch.int32, device=self._device)
        for at, row in enumerate(self._rows):
            begins = itertools.accumulate(sizes, initial=0)
            row.put_columns(
                block,
                [
                    begin + (at * heads + head + 1) * most
                    for begin, (_, heads, most) in zip(begins, shapes, strict=False)
                    for head in range(heads)
                ],
                since,
            )
        return [
            each.view(shape) for each, shape in zip(torch.split(block, sizes), shapes, strict=True)
        ]

    def _end(self, prompt_tokens: int) -> None:
        """Store as it is done behind a prompt of so many tokens, and note what was lost."""
        layers = [part.layer for part in self._parts]
        kept = ((layer, layer.kept_slots(prompt_tokens)) for layer in layers)
        encode(kept, layers[0].codes)
        if not len(self._rows[0].lost):  # or there are no votes
            return
        mass = torch.stack([row.lost / row.votes_sum.clamp(min=LEAST_VOTES) for row in self._rows])
        peak = torch.stack([row.peak for row in self._rows])
        heads = [part.heads for part in self._parts]
        lost = zip(torch.split(mass, heads, 1), torch.split(peak, heads, 1), strict=True)
        for part, (own, highest) in zip(self._parts, lost, strict=True):
            state, device = part.layer.state, part.layer.store.keys.device
            part.layer.state = replace(
                state, lost_mass=own.to(device), lost_peak=highest.to(device)
            )


def _side_by_side(scores: Tensor, rows: int) -> Tensor:
    """(B, layers * H, T) of (layers * B, H, T), see `PromptLayer.stack`."""
    of_layers = scores.view(len(scores) // rows, rows, *scores.shape[1:])
    return of_layers.transpose(0, 1).flatten(1, 2)


@dataclass
class _Part:
    """One layer of the prompt.

    Attributes:
        gaps: for each row by how much `_Row.at` of an entry exceeds its place in the layer's store.
    """

    layer: CompressedLayer
    heads: int
    gaps: list[int] = field(default_factory=list)

    def keep(
        self,
        columns: Tensor,
        counts: Sequence[list[int]],
        places: Sequence[tuple[int, Tensor]],
    ) -> None:
        """Hold only what stands at some places of each row's list, so many slots of each head.

        `columns` are theirs, (B, H, K); each row's stand in its list from another place on now.
        """
        layer, own = self.layer, list(map(sum, counts))
        slots = [each - gap for gap, (_, each) in zip(self.gaps, places, strict=True)]
        if self.heads > 1:
            rows = slots[0] if len(slots) == 1 else torch.cat(slots)
            layer.keep_rows(rows, tuple(map(tuple, counts)), columns)
            firsts = [0, *itertools.accumulate(own)]
        else:
            firsts = [columns.shape[-1] - count for count in own]
            padded = [
                F.pad(row, (empty, 0), value=-1) for row, empty in zip(slots, firsts, strict=True)
            ]
            selection = Selection(
                keep_indices=torch.stack(padded)[:, None].to(layer.keys.device),
                prompt_tokens=layer.store.slots,
                padding_slots=ops.on_device(firsts, layer.keys.device),
            )
            layer.keep(selection)
        self.gaps = [start - first for (start, _), first in zip(places, firsts, strict=False)]


class _Compared(NamedTuple):
    """Scores of a row's entries, those not listed before behind the others, and which are best.

    `ranks`, (M + 1,), and `before`, (S + 1,), are int64: how many of the best stand before each
    entry and before each head, and in all.
    """

    scores: Tensor
    best: Tensor
    ranks: Tensor
    before: Tensor


class _Row:
    """The entries of one row of the batch that may be among its best, M of S heads.

    Attributes:
        counts: how many of them each head has, layer by layer.
        scores: (M,) float32.
        columns: (M,) int32.
        at: (M,) int64, where in the list each stood when its layer let go of others.
        votes: (2, M) float32, its votes and what these are lifted to, see `VotesAtStake`.
        votes_sum, lost, peak: (S,) float32, of the prompt's votes on each head the sum, that of
            those dropped, and the highest that a dropped entry is lifted to.
    """

    def __init__(self, device: torch.device) -> None:
        none = torch.empty(0, dtype=torch.float32, device=device)
        self.counts: list[list[int]] = []
        self.scores, self.columns, self.at = none, none.int(), none.long()
        self.votes, self.votes_sum, self.lost, self.peak = none.expand(2, -1), none, none, none

    def compare(self, scores: Tensor, heads: list[int], total: int) -> _Compared:
        """Which are the best so many, where there are more, of heads with so many each."""
        scores = torch.cat([self.scores, scores])
        best = best_entries(scores[None], [total])[0]
        ends = itertools.accumulate([*itertools.chain(*self.counts), *heads], initial=0)
        ranks = F.pad(best.cumsum(0), (1, 0))
        return _Compared(scores, best, ranks, ranks[ops.on_device(list(ends), scores.device)])

    def note_lost(self, best: Tensor, votes: Tensor, heads: list[int]) -> None:
        """Count the (2, N) votes of entries that were not listed, and of all those not best."""
        counts = [*itertools.chain(*self.counts), *heads]
        sizes = ops.on_device(counts, best.device)
        of_head = torch.repeat_interleave(sizes, output_size=sum(counts))
        before, self.votes = self.votes.shape[1], torch.cat([self.votes, votes], dim=1)
        sums = F.pad(torch.stack([self.votes_sum, self.lost, self.peak]), (0, len(heads)))
        dropped = self.votes.masked_fill(best, 0.0)
        self.votes_sum = sums[0].index_add(0, of_head[before:], votes[0])
        self.lost = sums[1].index_add(0, of_head, dropped[0])
        self.peak = sums[2].scatter_reduce(0, of_head, dropped[1], "amax")

    def keep(
        self, compared: _Compared, before: list[int], columns: Tensor, heads: list[int]
    ) -> None:
        """List only the best; new layers, of so many heads, have these (N,) columns.

        `before` are the numbers of `compared`.
        """
        every = torch.arange(1, before[-1] + 1, device=self.at.device)
        chosen = torch.searchsorted(compared.ranks, every) - 1  # asks for no number, as nonzero()
        old = before[sum(map(len, self.counts))]
        self.scores = compared.scores[chosen]
        self.columns = torch.cat([self.columns, columns])[chosen]
        self.at = torch.cat([self.at[chosen[:old]], chosen[old:]])
        if self.votes.shape[1]:
            self.votes = self.votes[:, chosen]
        each = map(operator.sub, before[1:], before)
        layers = [*map(len, self.counts), *heads]
        self.counts = [list(itertools.islice(each, count)) for count in layers]

    def places(self, since: int) -> list[tuple[int, Tensor]]:
        """Where each layer from there on begins in the list, and `at` of its entries until now."""
        sizes = list(map(sum, self.counts[since:]))
        begin = len(self.at) - sum(sizes)
        before = torch.split(self.at[begin:], sizes)
        now = torch.arange(begin, len(self.at), device=self.at.device)
        self.at = torch.cat([self.at[:begin], now])
        return list(zip(itertools.accumulate(sizes, initial=begin), before, strict=False))

    def put_columns(self, block: Tensor, ends: list[int], since: int) -> None:
        """Write those of each head of the layers from there on into a block, up to its end."""
        counts = list(itertools.chain(*self.counts[since:]))
        gaps = list(map(operator.sub, ends, itertools.accumulate(counts)))
        sizes, gap = ops.on_device([counts, gaps], block.device)
        begin = len(self.columns) - sum(counts)
        places = gap.repeat_interleave(sizes, output_size=sum(counts))
        places += torch.arange(len(places), device=block.device)
        block[places] = self.columns[begin:]


def _sums_from(counts: Sequence[int], least: int) -> list[int]:
    """Of each number the sum from it on, with those of less as that many, and 0 at the end."""
    from_last = [max(count, least) for count in reversed(counts)]
    return [*itertools.accumulate(from_last, initial=0)][::-1]
