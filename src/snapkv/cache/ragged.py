"""Keys and values of heads that keep different numbers of tokens, one head behind the other."""

from dataclasses import dataclass

import torch
from torch import Tensor

from snapkv.policies import Selection


@dataclass(frozen=True, kw_only=True)
class RaggedStates:
    """What every head of every row has kept of the prompt, without a gap.

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

    @property
    def mean_tokens(self) -> float:
        """Tokens per row and head, on average."""
        return self.keys.shape[0] / (len(self.head_tokens) * len(self.head_tokens[0]))

    @property
    def held_bytes(self) -> int:
        """Bytes of the keys and values."""
        return self.keys.nbytes + self.values.nbytes
