"""A budget that the heads of all layers share, spent while the layers are read one after the other.

An entry is one token in one KV head of one layer. Of each batch row the N best entries of all
layers are kept. An entry that is not among the N best of the layers read so far cannot be among
the N best of all layers, so it can be evicted before the next layer is read. All entries but the
N best are evicted whenever the layers hold more than 2 N, and after the last layer. So the layers
hold at most 2 N entries of a row and one `LayerGroup`, and the work grows linearly with the
entries read. The result is exact: of equal scores the earlier layer, head and position wins.

Entries are listed in the order in which they lie in the layers' stores: by layer, batch row, head
and position. So all layers are compared in a few operations. On a GPU, launching operations for
each layer would take longer than running them.
"""

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from snapkv import ops
from snapkv.cache.layer import CompressedLayer
from snapkv.cache.layer_group import LayerGroup, quantize_slots
from snapkv.errors import UnsupportedModelError, wrong
from snapkv.policies import AcrossLayers, PromptLayer, Selection
from snapkv.policies.across_layers import best_entries
from snapkv.policies.states import LEAST_VOTES
from snapkv.storage.ragged import Counts


class _Entries(NamedTuple):
    """The scores, the columns and the votes of M entries.

    Attributes:
        scores: (M,) float32.
        columns: (M,) int32.
        votes: (2, M) float32, the votes of the window, and their `VotesAtStake.faded_shares`;
            (0, M) for a policy without votes.
    """

    scores: Tensor
    columns: Tensor
    votes: Tensor


class SharedBudget:
    """Keeps a list of all entries that the layers hold of a prompt, and evicts the worst of them.

    Args:
        policy: the policy of all layers, which scores the entries.
        first: the prompt in the first layer.
        is_final: whether later turns must not choose from this prompt again, even if every entry
            is kept.
    """

    def __init__(self, policy: AcrossLayers, first: PromptLayer, *, is_final: bool) -> None:
        self._policy, self._is_final, self._device = policy, is_final, first.keys.device
        # For each layer and row, how many tokens a head would keep if all heads kept the same. They
        # differ between layers, because a budget in bytes leaves a remainder to some of them.
        self._even_counts = [
            policy.even_counts(first.at_depth(depth)) for depth in range(first.num_layers)
        ]
        self._layers: list[CompressedLayer] = []
        self._counts: list[Counts] = []  # how many entries the heads of each layer hold
        self._entries: list[_Entries] = []  # those of all layers, in several parts
        self._tokens = 0  # how many entries were read, padding excluded
        self._vote_sums: list[Tensor] = []  # of each head, over all its entries
        none = torch.empty(0, device=self._device, dtype=torch.float32)
        self._lost_sums, self._lost_peaks = none, none  # of each head, over its evicted entries

    def add(self, group: LayerGroup) -> None:
        """Add layers that have read the prompt, and evict entries that are not among the best.

        Entries are evicted only if the layers hold too many. After the model's last layer, all
        layers hold exactly the entries that they keep.

        Args:
            group: the layers that follow those added before.

        Raises:
            InvalidArgumentError: the policy does not work with this prompt, or a number cannot be
                quantized.
            OutOfMemoryError: there is no room for the offloaded tokens.
            UnsupportedModelError: a layer has more heads than the first one.
        """
        stack, rows, depth = group.stack, len(group.prompts[0].keys), len(self._layers)
        if depth:
            counts = self._policy.even_counts(stack)
            by_layer = [counts[row : row + rows] for row in range(0, len(counts), rows)]
            self._even_counts[depth : depth + len(group)] = by_layer
        scores = self._policy.score_layer(stack, self._even_counts)
        heads, tokens = scores.shape[1:]
        self._layers += group.layers
        self._counts += [((tokens,) * heads,) * rows] * len(group)
        self._tokens += heads * sum(stack.row_lengths)
        self._list_entries(stack, scores)
        for layer, prompt in zip(group.layers, group.prompts, strict=True):
            assert layer.slots.kept is None
            layer.end_prompt(prompt)
        budgets = self._row_budgets()
        most_held = max([sum(map(sum, row)) for row in zip(*self._counts, strict=True)])
        if group.reaches_last or most_held > 2 * max(budgets):
            self._evict(budgets)
        if group.reaches_last:
            self._finish(tokens)

    def _list_entries(self, stack: PromptLayer, scores: Tensor) -> None:
        """List the entries of layers that have read the prompt.

        Args:
            stack: the layers, as rows of one layer.
            scores: (layers * B, H, T) float32.
        """
        heads, tokens = scores.shape[0] * scores.shape[1], scores.shape[2]
        votes = scores.new_empty(0, heads * tokens)
        if (at_stake := self._policy.votes_at_stake(stack)) is not None:
            both = torch.stack([at_stake.votes, at_stake.faded_shares()])
            votes = F.pad(both, (0, tokens - both.shape[-1])).flatten(1)
            of_head = torch.arange(heads, device=votes.device).repeat_interleave(tokens)
            sums = votes.new_zeros(heads).index_add(0, of_head, votes[0])
            self._vote_sums.append(sums.to(self._device))
        columns = torch.arange(tokens, dtype=torch.int32, device=self._device).repeat(heads)
        scores, votes = (each.to(self._device) for each in (scores.flatten(), votes))
        self._entries.append(_Entries(scores, columns, votes))

    def _row_budgets(self) -> list[int]:
        """Return how many entries of all layers together are kept, N, for each batch row.

        A layer that has not been read counts with the heads of the first layer and with as many
        tokens as the policy ever keeps, so N never grows while the layers are read.

        Raises:
            UnsupportedModelError: a layer has more heads than the first one.
        """
        heads = [len(counts[0]) for counts in self._counts]
        if heads[-1] > heads[0]:
            raise wrong(
                "model",
                "if layers share a budget, no layer can have more heads than the first layer, "
                f"but got {heads[0]} heads in the first and {heads[-1]} in a later one",
                "Use SnapKV or AdaKV instead",
                UnsupportedModelError,
            )
        unread = len(self._even_counts) - len(heads)
        least = [0] * len(heads) + [self._policy.policy.most_tokens or 0] * unread
        heads += [heads[0]] * unread
        rows = zip(*self._even_counts, strict=True)
        return [sum(map(operator.mul, heads, map(max, row, least))) for row in rows]

    def _evict(self, budgets: Sequence[int]) -> None:
        """Evict every entry that is not among the best of its batch row.

        If no entry is evicted, the layers are left unchanged, unless the choice is final.

        Args:
            budgets: for each batch row, how many entries it keeps.
        """
        held = _Entries(*[torch.cat(each, dim=-1) for each in zip(*self._entries, strict=True)])
        self._entries = [held]
        best, sizes = self._best(held.scores, budgets), self._head_sizes()
        ranks = F.pad(best.cumsum(0), (1, 0))  # how many of the best come before each entry
        ends = list(itertools.accumulate(sizes, initial=0))
        before = ranks[ops.on_device(ends, self._device)].tolist()  # waits for the device
        if before[-1] == self._tokens and not self._is_final:
            return
        self._add_lost(held.votes.masked_fill(best, 0.0), sizes)
        # Unlike nonzero(), a search needs no number from the device.
        every = torch.arange(1, before[-1] + 1, device=self._device)
        places = torch.searchsorted(ranks, every) - 1
        self._entries = [_Entries(*[each[..., places] for each in held])]
        ends = list(itertools.accumulate([sum(map(sum, counts)) for counts in self._counts]))
        kept = map(operator.sub, before[1:], before)
        self._counts = [
            tuple([tuple(itertools.islice(kept, len(row))) for row in counts])
            for counts in self._counts
        ]
        self._evict_unlisted(places, [0, *ends[:-1]])

    def _best(self, scores: Tensor, budgets: Sequence[int]) -> Tensor:
        """Return a mask of the entries that are among the best of their batch row.

        If scores are equal, the earlier layer, head and position wins. An entry with a score of
        minus infinity, such as padding, is never among the best, so a row may keep fewer entries
        than its budget.

        Args:
            scores: (M,) float32, the scores of all entries that are listed now.
            budgets: for each batch row, the largest number of entries that it keeps, at least 1.

        Returns:
            (M,) bool.
        """
        sizes, rows = [sum(row) for counts in self._counts for row in counts], len(budgets)
        pieces, best = torch.split(scores, sizes), []
        for row, budget in enumerate(budgets):
            of_row = torch.cat(pieces[row::rows])  # the entries of all layers
            best.append(torch.split(best_entries(of_row[None], [budget])[0], sizes[row::rows]))
        return torch.cat(list(itertools.chain(*zip(*best, strict=True))))

    def _head_sizes(self) -> list[int]:
        """Return the number of entries in each head, ordered by layer, batch row and head."""
        return list(itertools.chain(*itertools.chain(*self._counts)))

    def _add_lost(self, lost: Tensor, sizes: Sequence[int]) -> None:
        """Add votes to what each head has lost.

        Args:
            lost: (2, M) float32, as `_Entries.votes`; 0 for entries that are kept.
            sizes: how many of the entries each head holds.
        """
        if not len(lost):
            return
        size, new = ops.on_device(sizes, self._device), len(sizes) - len(self._lost_sums)
        head = torch.repeat_interleave(size, output_size=lost.shape[1])
        sums, peaks = F.pad(self._lost_sums, (0, new)), F.pad(self._lost_peaks, (0, new))
        self._lost_sums = sums.index_add(0, head, lost[0])
        self._lost_peaks = peaks.scatter_reduce(0, head, lost[1], "amax")

    def _evict_unlisted(self, places: Tensor, starts: Sequence[int]) -> None:
        """Remove the tokens that are no longer listed as entries from the stores of the layers.

        Args:
            places: (M,) int64, where each listed entry was listed before.
            starts: where the entries of each layer began before.
        """
        sizes = [sum(map(sum, counts)) for counts in self._counts]
        start, size = ops.on_device([starts, sizes], self._device)
        rows = places - start.repeat_interleave(size, output_size=len(places))
        parts = zip(
            self._layers, torch.split(rows, sizes), self._counts, self._columns(), strict=True
        )
        for layer, own_rows, counts, columns in parts:
            if len(counts[0]) > 1:
                _keep_rows(layer, own_rows, counts, columns)
            else:
                _keep_columns(layer, counts, columns)

    def _columns(self) -> Iterator[Tensor]:
        """Yield the columns of the entries of each layer.

        All layers share one block of memory, which takes few operations to fill.

        Yields:
            (B, H, K) int32 for each layer, ascending after a run of -1.
        """
        shapes = [(len(counts), len(counts[0]), max(map(max, counts))) for counts in self._counts]
        sizes = self._head_sizes()
        widths = [longest for rows, heads, longest in shapes for _ in range(rows * heads)]
        gaps = map(operator.sub, itertools.accumulate(widths), itertools.accumulate(sizes))
        size, gap = ops.on_device([sizes, list(gaps)], self._device)
        places = gap.repeat_interleave(size, output_size=sum(sizes))
        places += torch.arange(len(places), device=self._device)
        block = torch.full((sum(widths),), -1, dtype=torch.int32, device=self._device)
        block[places] = self._entries[0].columns
        return map(Tensor.view, torch.split(block, list(map(math.prod, shapes))), shapes)

    def _finish(self, prompt_tokens: int) -> None:
        """Quantize the kept tokens, and store in each layer how many votes it has lost.

        Without a quantized form, the tokens stay as they are.

        Args:
            prompt_tokens: how many tokens the prompt has.

        Raises:
            InvalidArgumentError: a number cannot be quantized.
        """
        kept = ((layer, layer.slots.kept_slots(prompt_tokens)) for layer in self._layers)
        quantize_slots(kept, self._layers[0].codes)
        if not len(self._lost_sums):  # every entry is kept, or the policy has no votes
            return
        masses = self._lost_sums / torch.cat(self._vote_sums).clamp(min=LEAST_VOTES)
        shapes = [(len(counts), len(counts[0])) for counts in self._counts]
        sizes = list(map(math.prod, shapes))
        lost = zip(torch.split(masses, sizes), torch.split(self._lost_peaks, sizes), strict=True)
        for layer, shape, (mass, peak) in zip(self._layers, shapes, lost, strict=True):
            device = layer.keys.device
            own = {
                "lost_mass": mass.view(shape).to(device),
                "lost_peak": peak.view(shape).to(device),
            }
            layer.state = replace(layer.state, **own)


def _keep_rows(layer: CompressedLayer, rows: Tensor, counts: Counts, columns: Tensor) -> None:
    """Keep some tokens of each head, and evict the others. With recall, offload all tokens first.

    Args:
        layer: the layer, which changes in place.
        rows: (N,) int64, the kept tokens, as indices into the list of all tokens, head by head.
        counts: how many of them each head keeps.
        columns: (B, H, K) int32, the columns of these tokens; -1 in front if a head keeps fewer
            than K.
    """
    tokens, device, ids = layer.store.slots, layer.keys.device, layer.state.token_ids
    seen_columns = layer.slots.count_columns(tokens)
    layer.offloaded.append_up_to(tokens, layer.store)
    layer.store = store = layer.store.as_ragged(None, tokens)
    store.select_flat(rows.to(device), counts)
    layer.slots = layer.slots.with_kept(columns.to(device), seen_columns, padding_slots=None)
    ids = None if ids is None else ids[:, tokens:]
    layer.state = replace(layer.state, head_notes=None, token_ids=ids)


def _keep_columns(layer: CompressedLayer, counts: Counts, columns: Tensor) -> None:
    """Keep the tokens in some columns of a layer with a single KV head, and evict the others.

    Such a layer stays dense, with padding in batch rows that keep fewer than K tokens.

    Args:
        layer: the layer, which changes in place.
        counts: how many tokens each row keeps.
        columns: (B, 1, K) int32, ascending after a run of -1.
    """
    kept, columns = layer.slots.kept, columns.to(layer.keys.device)
    slots = columns.long()
    if kept is not None:
        slots = torch.searchsorted(kept, columns).masked_fill(columns < 0, -1)
    numbers, tokens = torch.tensor(counts), layer.store.slots
    layer.keep(Selection.of_counts(slots, numbers, per_head_budget=False, prompt_tokens=tokens))
