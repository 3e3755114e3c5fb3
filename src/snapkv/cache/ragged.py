"""Keys and values of heads that keep different numbers of tokens, one head behind the other.

Per-head slots are also counted in a padded layout, as kept positions and scores have it: every head
has as many slots as the longest one, and its tokens are the last of them.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from snapkv.ops import RaggedLayout
from snapkv.policies import Selection


@dataclass(frozen=True, kw_only=True)
class RaggedStates:
    """What every head of every row has kept, without a gap.

    Attributes:
        keys: (N, D), N the sum of `head_tokens`; rows first, then heads, then ascending positions.
        values: (N, Dv).
        head_tokens: tokens of each head, row by row: B lists of H numbers.
    """

    keys: Tensor
    values: Tensor
    head_tokens: tuple[tuple[int, ...], ...]

    @classmethod
    def gather(cls, keys: Tensor, values: Tensor, selection: Selection) -> "RaggedStates":
        """Copy what a selection keeps out of (B, Hkv, T, D) states, bit for bit."""
        assert selection.head_tokens is not None
        index = selection.keep_indices
        heads = torch.arange(index.shape[1], device=index.device) * keys.shape[1] // index.shape[1]
        rows = torch.arange(index.shape[0], device=index.device)
        kept = index >= 0
        where = (
            rows[:, None, None].expand_as(index)[kept],
            heads[None, :, None].expand_as(index)[kept],
            index[kept],
        )
        counts = tuple(tuple(row) for row in selection.head_tokens.tolist())
        return cls(keys=keys[where], values=values[where], head_tokens=counts)

    def segments(self) -> list[list[tuple[Tensor, Tensor]]]:
        """For each row and head its (keys, values), views of (n, D) and (n, Dv)."""
        counts = [count for row in self.head_tokens for count in row]
        pairs = list(
            zip(torch.split(self.keys, counts), torch.split(self.values, counts), strict=True)
        )
        heads = len(self.head_tokens[0])
        return [pairs[start : start + heads] for start in range(0, len(pairs), heads)]

    def select_rows(self, rows: Tensor) -> "RaggedStates":
        """The rows in that order, each as often as it is named."""
        segments = self.segments()
        chosen = [pair for row in rows.tolist() for pair in segments[row]]
        return RaggedStates(
            keys=torch.cat([keys for keys, _ in chosen]),
            values=torch.cat([values for _, values in chosen]),
            head_tokens=tuple(self.head_tokens[row] for row in rows.tolist()),
        )

    @functools.cached_property
    def layout(self) -> RaggedLayout:
        """Where each head's tokens stand, as attention asks for it."""
        return RaggedLayout(self.head_tokens, self.keys.device)

    def with_tail(self, keys: Tensor, values: Tensor, real: Tensor | None) -> "RaggedStates":
        """Every head's tokens, and behind them its part of what came behind the prompt.

        Args:
            keys: (B, H, N, D).
            values: (B, H, N, Dv).
            real: (B, N) bool, which of the N are no pads; None for all.
        """
        B, added = keys.shape[0], [keys.shape[2]] * keys.shape[0]
        rows = list(zip(keys, values, strict=True))
        if real is not None:
            added = real.sum(dim=-1).tolist()
            rows = [(rows[b][0][:, real[b]], rows[b][1][:, real[b]]) for b in range(B)]
        tails = [pair for row in rows for pair in zip(*row, strict=True)]
        pairs = [pair for row in self.segments() for pair in row]
        both = [piece for pair in zip(pairs, tails, strict=True) for piece in pair]
        return RaggedStates(
            keys=torch.cat([piece[0] for piece in both]),
            values=torch.cat([piece[1] for piece in both]),
            head_tokens=tuple(
                tuple(count + new for count in row)
                for row, new in zip(self.head_tokens, added, strict=True)
            ),
        )

    def padded_keys(self) -> Tensor:
        """(B, H, S, D), S the tokens of the longest head; any key in the slots of no token."""
        return self._padded(self.keys)

    def padded_values(self) -> Tensor:
        """(B, H, S, Dv), as `padded_keys`."""
        return self._padded(self.values)

    def _padded(self, states: Tensor) -> Tensor:
        slots = torch.arange(self.longest_tokens, device=states.device)
        places = self._places(slots).clamp(min=0)
        return states.index_select(0, places.flatten()).view(*places.shape, -1)

    def keep(self, keep_indices: Tensor) -> "RaggedStates":
        """Copy the tokens of these slots.

        Args:
            keep_indices: (B, H, K) int64, slots of the padded layout, ascending after a leading run
                of -1.
        """
        kept = keep_indices >= 0
        places = self._places(keep_indices)[kept]
        counts = tuple(tuple(row) for row in kept.sum(dim=-1).tolist())
        return RaggedStates(
            keys=self.keys.index_select(0, places),
            values=self.values.index_select(0, places),
            head_tokens=counts,
        )

    def _places(self, slots: Tensor) -> Tensor:
        """Where the tokens of slots of the padded layout stand: (B, H, K); negative for none."""
        counts = torch.tensor(self.head_tokens, device=self.keys.device)
        ends = counts.flatten().cumsum(0).view_as(counts)
        from_end = self.longest_tokens - slots
        places = ends[..., None] - from_end
        return places.masked_fill(from_end > counts[..., None], -1)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the head that has most, the slots of the padded layout."""
        return max(max(row) for row in self.head_tokens)

    @property
    def mean_tokens(self) -> float:
        """Tokens per row and head, on average."""
        return self.keys.shape[0] / (len(self.head_tokens) * len(self.head_tokens[0]))

    @property
    def held_bytes(self) -> int:
        """Bytes of the keys and values."""
        return self.keys.nbytes + self.values.nbytes
