"""A step's attention to heads of different length, by several kernels, of the same tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from snapkv import ops
from snapkv.ops.ragged.api import RaggedImplementation
from snapkv.policies.budget import largest_remainder

SURE = 0.2
"""Of a mean head, what every head holds, as in `AdaKV`."""


KERNELS = ("snapkv", "varlen_attn", "sdpa, padded", EVEN := "sdpa, even")
"""Of snapkv and of torch; the last one as if every head held as many."""


@dataclass(frozen=True)
class RaggedHeads:
    """What H heads of B rows hold, N tokens one head after the other, and G queries of each head.

    Attributes:
        queries: (B, H, G, D).
        keys: (N, D), likewise `values`.
        counts: tokens of each head, row by row.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    counts: list[list[int]]

    @classmethod
    def drawn(
        cls,
        queries: tuple[int, int, int, int],
        tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> "RaggedHeads":
        """Random ones of that mean, as far apart as normal draws of their logarithms."""
        rows, heads, _, head_dim = queries
        source = torch.Generator().manual_seed(0)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=source).to(device, dtype)

        won = torch.randn(rows, heads, generator=source).softmax(dim=-1) * heads
        shares = (tokens * (SURE + (1 - SURE) * won)).tolist()
        counts = [largest_remainder(row, tokens * heads) for row in shares]
        count = rows * heads * tokens
        return cls(numbers(*queries), numbers(count, head_dim), numbers(count, head_dim), counts)

    def attention(self, kernel: str) -> Callable[[], Tensor]:
        """What computes (B, H, G, D) of them, or of equally many tokens for "sdpa, even"."""
        made: tuple[Callable[[], Callable[[], Tensor]], ...] = (
            self._of_snapkv,
            self._of_varlen_attn,
            self._of_sdpa_padded,
            self._of_sdpa_even,
        )
        return made[KERNELS.index(kernel)]()

    def plainly(self) -> Tensor:
        """The same by the definition."""
        return self._of_snapkv("reference")()

    @property
    def _ends(self) -> Tensor:
        """(B * H,) int64, on the host."""
        return torch.tensor(self.counts).flatten().cumsum(0)

    def _of_snapkv(self, impl: RaggedImplementation = "auto") -> Callable[[], Tensor]:
        """The last token of each head is that of the query, which stands in the tail."""
        B, H, G, D = self.queries.shape
        last = (self._ends - 1).to(self.keys.device)
        others = torch.ones(len(self.keys), dtype=torch.bool).index_fill(0, self._ends - 1, False)
        before = others.nonzero()[:, 0].to(self.keys.device)
        counts = tuple(tuple(count - 1 for count in row) for row in self.counts)
        attend = partial(
            ops.ragged_attention,
            self.queries.view(B, H * G, 1, D),
            self.keys[before],
            self.values[before],
            ops.RaggedLayout(counts, self.keys.device),
            self.keys[last].view(B, H, 1, D),
            self.values[last].view(B, H, 1, D),
            ops.ScoreOptions(scaling=D**-0.5),
            impl=impl,
        )
        return lambda: attend().view(B, H, G, D)

    def _of_varlen_attn(self) -> Callable[[], Tensor]:
        """A group's query heads are queries of one sequence, so that a key is read once."""
        from torch.nn.attention.varlen import varlen_attn  # of torch 2.10 and later, for CUDA

        B, H, G, D = self.queries.shape
        device = self.keys.device
        queries = torch.arange(0, B * H * G + 1, G, dtype=torch.int32, device=device)
        attend: Callable[[], Any] = partial(
            varlen_attn,
            self.queries.view(B * H * G, 1, D),
            self.keys[:, None],
            self.values[:, None],
            queries,
            F.pad(self._ends, (1, 0)).to(device, torch.int32),
            G,
            max(map(max, self.counts)),
        )
        return lambda: attend().view(B, H, G, D)

    def _of_sdpa_padded(self) -> Callable[[], Tensor]:
        """Every head as long as the longest one, behind a mask."""
        B, H, _, D = self.queries.shape
        longest, counts = max(map(max, self.counts)), torch.tensor(self.counts).view(B, H, 1)
        places = torch.arange(longest)
        rows = (self._ends.view(B, H, 1) - counts + places).clamp(max=len(self.keys) - 1)
        rows, mask = (each.to(self.keys.device) for each in (rows, places < counts))
        keys, values = (
            states[rows.flatten()].view(B, H, longest, D) for states in (self.keys, self.values)
        )
        return partial(
            F.scaled_dot_product_attention, self.queries, keys, values, attn_mask=mask[:, :, None]
        )

    def _of_sdpa_even(self) -> Callable[[], Tensor]:
        """As if every head held as many."""
        B, H, _, D = self.queries.shape
        keys, values = (states.view(B, H, -1, D) for states in (self.keys, self.values))
        return partial(F.scaled_dot_product_attention, self.queries, keys, values)
