"""Ragged states: heads that keep different numbers of tokens, stored one after the other.

Slots of a head are also counted in a padded layout, which kept positions and scores use: every head
has as many slots as the longest one, and its tokens are in the last of them.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from snapkv import ops
from snapkv.ops import RaggedLayout, ScoreOptions, TailInputs, ragged_attention
from snapkv.storage.tail import Pair

Counts = tuple[tuple[int, ...], ...]
"""Tokens of each head, row by row: B tuples of H numbers."""


@dataclass(frozen=True, kw_only=True)
class RaggedStates:
    """The keys and values of all heads of a layer, stored one head after the other.

    Attributes:
        keys: (N, D), N the sum of `head_tokens`; rows first, then heads, then ascending positions.
        values: (N, Dv).
        head_tokens: tokens of each head.
        least_slots: the fewest slots that the padded layout has.
    """

    keys: Tensor
    values: Tensor
    head_tokens: Counts
    least_slots: int = 0

    @classmethod
    def gather(
        cls, keys: Tensor, values: Tensor, index: Tensor, counts: Counts | None = None
    ) -> "RaggedStates":
        """Create ragged states from copies of the tokens that each head has selected.

        Args:
            keys: (B, Hkv, T, D).
            values: (B, Hkv, T, Dv).
            index: (B, H, K) slots after leading entries of -1, which are no tokens.
            counts: tokens of each head; None to count them, which waits for a GPU.
        """
        rows = ops.flat_rows(keys, index)
        return cls.from_dense(keys, values)._at_last(rows, counts or tokens_of(index))

    def _at_last(self, rows: Tensor, counts: Counts) -> "RaggedStates":
        """Create ragged states from the last of some flat rows.

        Args:
            rows: (B, H, K) row numbers in `keys` and `values`.
            counts: how many of the last entries of each head are copied.
        """
        heads = zip(rows.flatten(0, 1), itertools.chain(*counts), strict=True)
        return self.select_flat(torch.cat([head[len(head) - n :] for head, n in heads]), counts)

    def select_flat(self, rows: Tensor, counts: Counts) -> "RaggedStates":
        """Copy the tokens in the given rows of `keys` and `values`.

        Args:
            rows: (N,) row numbers, one head after the other.
            counts: how many of the rows belong to each head.
        """
        keys, values = self.keys.index_select(0, rows), self.values.index_select(0, rows)
        return RaggedStates(keys=keys, values=values, head_tokens=counts)

    @classmethod
    def stack(cls, several: Sequence["RaggedStates"]) -> "RaggedStates":
        """Combine the states of several layers, as if they were rows of one batch."""
        if len(several) == 1:
            return several[0]
        return cls(
            keys=torch.cat([states.keys for states in several]),
            values=torch.cat([states.values for states in several]),
            head_tokens=tuple(itertools.chain(*(states.head_tokens for states in several))),
        )

    @classmethod
    def from_dense(cls, keys: Tensor, values: Tensor) -> "RaggedStates":
        """Create ragged states from heads that all hold the same number of tokens.

        Nothing is copied if the tensors are contiguous.

        Args:
            keys: (B, H, N, D).
            values: (B, H, N, Dv).
        """
        B, H, N, _ = keys.shape
        return cls(
            keys=keys.flatten(0, 2), values=values.flatten(0, 2), head_tokens=((N,) * H,) * B
        )

    def select(self, keep_indices: Tensor, counts: Counts | None = None) -> "RaggedStates":
        """Copy the tokens in the given slots of the padded layout.

        Args:
            keep_indices: (B, H, K) slots after leading entries of -1, which are no tokens. A slot
                that holds no token counts as -1 if `counts` is None.
            counts: as in `gather`.
        """
        rows, is_token = self._rows(keep_indices)
        counts = counts or tokens_of(keep_indices.where(is_token, -1))
        return replace(self._at_last(rows, counts), least_slots=keep_indices.shape[-1])

    def slots(self) -> Tensor:
        """Return the number of each slot of the padded layout, or -1 if the slot is empty.

        Returns:
            (B, H, S) int64.
        """
        slots = torch.arange(self.longest_tokens, device=self.keys.device)
        counts = ops.on_device(self.head_tokens, self.keys.device)[..., None]
        return slots.where(slots >= self.longest_tokens - counts, -1)

    def decoded(self) -> "RaggedStates":
        return self

    def select_rows(self, rows: Tensor) -> "RaggedStates":
        """Return the given rows of the batch, in this order; a row may be repeated."""
        segments = self._segments()
        counts = tuple(self.head_tokens[row] for row in rows.tolist())
        chosen = _concatenated((pair for row in rows.tolist() for pair in segments[row]), counts)
        return replace(chosen, least_slots=self.least_slots)

    def joined(self, other: "RaggedStates") -> "RaggedStates":
        """Append the tokens of each head of `other` to the same head of these states."""
        both = (self._segments(), other._segments())
        pairs = (
            pair for rows in zip(*both, strict=True) for heads in zip(*rows, strict=True)
            for pair in heads
        )  # fmt: skip
        counts = tuple(
            tuple(map(sum, zip(*rows, strict=True)))
            for rows in zip(self.head_tokens, other.head_tokens, strict=True)
        )
        return _concatenated(pairs, counts)

    def _segments(self) -> list[list[Pair]]:
        """Return the keys and values of each head as views, in one list per row."""
        counts = [count for row in self.head_tokens for count in row]
        parts = (torch.split(states, counts) for states in (self.keys, self.values))
        pairs = zip(*parts, strict=True)
        return [[next(pairs) for _ in row] for row in self.head_tokens]

    @functools.cached_property
    def layout(self) -> RaggedLayout:
        """The layout that tells attention where the tokens of each head are."""
        return RaggedLayout(self.head_tokens, self.keys.device)

    def padded_keys(self) -> Tensor:
        """Return the keys in the padded layout.

        Slots without a token hold arbitrary keys.

        Returns:
            (B, H, S, D).
        """
        return self._padded(self.keys)

    def padded_values(self) -> Tensor:
        return self._padded(self.values)

    def _padded(self, states: Tensor) -> Tensor:
        slots = torch.arange(self.longest_tokens, device=states.device)
        rows = self._rows(slots)[0].clamp(min=0)
        if not len(states):  # no head holds a token
            return states.new_zeros(*rows.shape, states.shape[-1])
        return states.index_select(0, rows.flatten()).view(*rows.shape, states.shape[-1])

    def _rows(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Convert slots of the padded layout into rows of `keys` and `values`.

        Returns:
            (B, H, K) row numbers, and (B, H, K) bool, whether a slot holds a token.
        """
        longest, counts = self.longest_tokens, list(itertools.chain(*self.head_tokens))
        ends = itertools.accumulate(counts)
        heads = [[end - longest, longest - count] for end, count in zip(ends, counts, strict=True)]
        both = ops.on_device(heads, self.keys.device).view(len(self.head_tokens), -1, 1, 2)
        return slots + both[..., 0], slots >= both[..., 1]

    @functools.cached_property
    def longest_tokens(self) -> int:
        """The number of slots in the padded layout."""
        return max(self.least_slots, *map(max, self.head_tokens))

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def index_bytes(self) -> int:
        """The number of bytes of the tensors that describe the layout."""
        return self.layout.held_bytes

    def attend(
        self,
        queries: Tensor,
        tail: Pair,
        score_options: ScoreOptions,
        own_visible: Tensor | None = None,
        tail_tokens: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention of the queries to these states and to the tail.

        The arguments are the fields of `snapkv.ops.TailInputs`.

        Returns:
            (B, Hq, Q, Dv).
        """
        inputs = TailInputs(queries, *tail, score_options, own_visible, tail_tokens)
        return ragged_attention(inputs, self.keys, self.values, self.layout)


def tokens_of(index: Tensor) -> Counts:
    """Count the tokens of each head.

    Waits for a GPU.

    Args:
        index: (B, H, K) slots, -1 for entries that are no tokens.
    """
    return tuple(map(tuple, (index >= 0).sum(dim=-1).tolist()))


def _concatenated(pairs: Iterable[Pair], counts: Counts) -> RaggedStates:
    keys, values = map(torch.cat, zip(*pairs, strict=True))
    return RaggedStates(keys=keys, values=values, head_tokens=counts)
