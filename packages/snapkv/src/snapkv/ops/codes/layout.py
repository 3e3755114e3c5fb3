"""Which block of codes belongs to which head, and how many tokens it holds."""

import functools
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

HeadTokens = tuple[tuple[int, ...], ...]
"""Tokens of each head, row by row: B tuples of H numbers."""


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Heads in whole blocks, in the sections in which they were encoded.

    A section has the blocks of all heads, one head behind the other, rows first; the last block of
    a head may hold fewer tokens than the others. In a head, later sections hold later tokens.

    Attributes:
        sections: tokens of each head in every section.
        block_tokens: G, tokens of a whole block.
        device: where its tensors are made, when they are first asked for.
    """

    sections: tuple[HeadTokens, ...]
    block_tokens: int
    device: torch.device

    @functools.cached_property
    def head_tokens(self) -> HeadTokens:
        """Tokens of each head in all sections."""
        rows = zip(*self.sections, strict=True)
        return tuple(tuple(map(sum, zip(*row, strict=True))) for row in rows)

    @functools.cached_property
    def heads(self) -> Tensor:
        """(M,) int64: the head of every block, counted over all rows."""
        with torch.inference_mode(False):  # for callers that want gradients, too
            heads = [head for head, _ in self._blocks]
            return torch.tensor(heads, dtype=torch.int64, device=self.device)

    @functools.cached_property
    def hidden(self) -> Tensor:
        """(M, 1, G) bool: the tokens of a block that are none."""
        with torch.inference_mode(False):
            tokens = torch.tensor([[[count]] for _, count in self._blocks], device=self.device)
            places = torch.arange(self.block_tokens, device=self.device)
            return places >= tokens.view(-1, 1, 1)

    @functools.cached_property
    def table(self) -> tuple[Tensor, Tensor, Tensor]:
        """(M,) blocks head by head, (B * H + 1,) where heads begin, (M,) tokens of each block."""
        with torch.inference_mode(False):
            heads = sum(map(len, self.sections[0]))
            counts = torch.bincount(self.heads, minlength=heads)
            begins = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
            return self.heads.argsort(stable=True), begins, (~self.hidden).sum(dim=(1, 2))

    @functools.cached_property
    def flat(self) -> Tensor:
        """(N,) int64: where each token stands in M * G slots, in the order of flat states."""
        with torch.inference_mode(False):
            by_head = self.table[0]
            slots = torch.arange(len(self._blocks) * self.block_tokens, device=self.device)
            slots, hidden = slots.view(-1, self.block_tokens), self.hidden[:, 0]
            return slots[by_head][~hidden[by_head]]

    def rows_to_encode(self) -> Tensor:
        """(M * G,) int64: the flat tokens of every block; a head's last one where there is none."""
        assert len(self.sections) == 1
        counts = [count for row in self.sections[0] for count in row]
        starts = torch.tensor([0, *accumulate(counts)], device=self.device)
        begun = torch.tensor(
            [place for count in counts for place in range(0, count, self.block_tokens)],
            dtype=torch.int64,
            device=self.device,
        )
        places = begun[:, None] + torch.arange(self.block_tokens, device=self.device)
        ends = starts.diff()[self.heads] - 1
        return (starts[self.heads][:, None] + places.minimum(ends[:, None])).flatten()

    def joined(self, section: HeadTokens) -> "BlockLayout":
        """The same, and a section behind it."""
        return BlockLayout((*self.sections, section), self.block_tokens, self.device)

    @functools.cached_property
    def _blocks(self) -> list[tuple[int, int]]:
        """Head and tokens of every block."""
        return [
            (head, min(self.block_tokens, count - start))
            for section in self.sections
            for head, count in enumerate(count for row in section for count in row)
            for start in range(0, count, self.block_tokens)
        ]

    @property
    def nbytes(self) -> int:
        """Of the tensors that have been made so far."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))
