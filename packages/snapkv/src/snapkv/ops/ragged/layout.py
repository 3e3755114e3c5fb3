"""Where the tokens of each head are in ragged (varlen) states, one head after the other."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from snapkv.ops.numbers import on_device

BLOCK_TOKENS = 64
"""Tokens of a piece; few, so that little is copied for heads that begin inside one."""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Describes how the tokens of all heads are divided into pieces of the same size.

    First come all whole blocks, then the edges. A block belongs to the head of its first token.
    Tokens of later heads in it are hidden and are copied once more into edges, at most one edge per
    head.

    Attributes:
        heads: (P,) int64, the head that each piece belongs to, counted over all rows.
        hidden: (P, 1, BLOCK_TOKENS) bool, the tokens of a piece that are not its head's.
        edge_rows: (E, BLOCK_TOKENS) int64, the flat rows that each edge copies.
    """

    heads: Tensor
    hidden: Tensor
    edge_rows: Tensor

    def cut(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Divide keys or values into blocks and edges.

        Args:
            states: (N, D).

        Returns:
            The blocks, which are a view, and the edges, which are a copy: both (., BLOCK_TOKENS,
            D).
        """
        whole = len(self.heads) - len(self.edge_rows)
        blocks = states[: whole * BLOCK_TOKENS].view(whole, BLOCK_TOKENS, states.shape[1])
        edges = states.index_select(0, self.edge_rows.flatten())
        return blocks, edges.view(len(self.edge_rows), BLOCK_TOKENS, states.shape[1])


@dataclass(frozen=True, eq=False)
class RaggedLayout:
    """The number of tokens in each head, and the tensors that attention derives from it.

    Attributes:
        head_tokens: tokens of each head, row by row: B lists of H numbers.
        device: where tensors are made when they are first needed.
    """

    head_tokens: tuple[tuple[int, ...], ...]
    device: torch.device

    @functools.cached_property
    def longest_tokens(self) -> int:
        """The number of tokens in the longest head."""
        return max(max(row) for row in self.head_tokens)

    @functools.cached_property
    def starts(self) -> Tensor:
        """The index of the first token of each head, and the end of the last head.

        Shape: (B * H + 1,) int64.
        """
        with torch.inference_mode(False):  # a later caller may need gradients
            counts = on_device(self.head_tokens, self.device).flatten()
            return torch.nn.functional.pad(counts.cumsum(0), (1, 0))

    @functools.cached_property
    def pieces(self) -> Pieces:
        """The division of all tokens into pieces of the same size."""
        blocks, edges = self._cut()
        with torch.inference_mode(False):
            both = on_device([*blocks, *edges], self.device)
            starts, stops, heads = both.view(-1, 3).unbind(dim=1)
            rows = starts[:, None] + torch.arange(BLOCK_TOKENS, device=self.device)
            return Pieces(
                heads=heads,
                hidden=(rows >= stops[:, None])[:, None],
                edge_rows=rows[len(blocks) :].clamp(max=sum(self.counts) - 1),
            )

    @property
    def held_bytes(self) -> int:
        """The number of bytes of the tensors that have been created so far."""
        made = [value for name, value in vars(self).items() if name == "starts"]
        if "pieces" in vars(self):
            made += [self.pieces.heads, self.pieces.hidden, self.pieces.edge_rows]
        return sum(tensor.nbytes for tensor in made)

    def _cut(self) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """Return the start, the stop and the head of each block and of each edge."""
        counts = self.counts
        whole = sum(counts) // BLOCK_TOKENS
        blocks: list[tuple[int, int, int]] = []
        edges: list[tuple[int, int, int]] = []
        start = 0
        for head, count in enumerate(counts):
            end = start + count
            while start < end:
                block, offset = divmod(start, BLOCK_TOKENS)
                stop = min(start + BLOCK_TOKENS - offset, end)
                (edges if offset or block == whole else blocks).append((start, stop, head))
                start = stop
        return blocks, edges

    @functools.cached_property
    def counts(self) -> list[int]:
        """The number of tokens in each head, as one list for all rows."""
        return [count for row in self.head_tokens for count in row]

    @functools.cached_property
    def fewest_tokens(self) -> int:
        """The number of tokens in the shortest head."""
        return min(self.counts)
