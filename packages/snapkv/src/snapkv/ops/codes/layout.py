"""Which block of codes belongs to which head, and how many tokens it holds."""

import functools
from dataclasses import dataclass

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
            heads = [head for head, *_ in self._blocks]
            return torch.tensor(heads, dtype=torch.int64, device=self.device)

    @functools.cached_property
    def hidden(self) -> Tensor:
        """(M, 1, G) bool: the tokens of a block that are none."""
        with torch.inference_mode(False):
            tokens = torch.tensor([count for *_, count in self._blocks], device=self.device)
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

    @property
    def flat(self) -> Tensor:
        """(N,) int64: where each token stands in M * G slots, in the order of flat states."""
        with torch.inference_mode(False):
            by_head = self.table[0]
            slots = torch.arange(len(self._blocks) * self.block_tokens, device=self.device)
            slots, hidden = slots.view(-1, self.block_tokens), self.hidden[:, 0]
            return slots[by_head][~hidden[by_head]]

    @property
    def places(self) -> Tensor:
        """(M, G) int64: which of its head's tokens in the section each slot is, or its last one."""
        bounds = [[start, count - 1] for _, start, count in self._blocks]
        last = torch.tensor(bounds, dtype=torch.int64)
        last = last.to(self.device).view(-1, 2, 1)
        within = torch.arange(self.block_tokens, device=self.device)
        return last[:, 0] + within.minimum(last[:, 1])

    def blocks_of_rows(self, rows: list[int]) -> Tensor:
        """The blocks of these rows, each as often as it is named, section by section."""
        of_row: dict[tuple[int, int], list[int]] = {}
        block = 0
        for part, section in enumerate(self.sections):
            for row, counts in enumerate(section):
                blocks = sum(-(-count // self.block_tokens) for count in counts)
                of_row[part, row] = list(range(block, block + blocks))
                block += blocks
        chosen = [
            one for part in range(len(self.sections)) for row in rows for one in of_row[part, row]
        ]
        return torch.tensor(chosen, dtype=torch.int64, device=self.device)

    def joined(self, section: HeadTokens) -> "BlockLayout":
        """The same, and a section behind it."""
        return BlockLayout((*self.sections, section), self.block_tokens, self.device)

    @functools.cached_property
    def _blocks(self) -> list[tuple[int, int, int]]:
        """Head, first token in its section and number of tokens of every block."""
        return [
            (head, start, min(self.block_tokens, count - start))
            for section in self.sections
            for head, count in enumerate(count for row in section for count in row)
            for start in range(0, count, self.block_tokens)
        ]

    @property
    def nbytes(self) -> int:
        """Of what attention needs, and of the table where a kernel has asked for it."""
        tensors = [self.heads, self.hidden, *(self.table if "table" in vars(self) else ())]
        return sum(tensor.nbytes for tensor in tensors)
