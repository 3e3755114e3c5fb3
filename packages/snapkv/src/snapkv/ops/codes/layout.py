"""Which block of codes belongs to which head, and how many tokens it holds."""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snapkv.ops.numbers import on_device

HeadTokens = tuple[tuple[int, ...], ...]
"""Tokens of each head, row by row: B tuples of H numbers."""


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Describes which blocks belong to each head, and how many tokens each block holds.

    The blocks of a head follow each other, and the heads of a row, too. A head grows by sections,
    the tokens that were encoded together. The last block of each section may hold fewer tokens than
    the others.

    Attributes:
        sections: tokens of each head in every section, the earlier tokens first.
        block_tokens: G, tokens of a whole block.
        device: where tensors are made when they are first needed.
    """

    sections: tuple[HeadTokens, ...]
    block_tokens: int
    device: torch.device

    @functools.cached_property
    def head_tokens(self) -> HeadTokens:
        """The number of tokens in each head, over all sections."""
        rows = zip(*self.sections, strict=True)
        return tuple(tuple(map(sum, zip(*row, strict=True))) for row in rows)

    @functools.cached_property
    def head_blocks(self) -> list[int]:
        """The number of blocks in each head, as one list for all rows."""
        of_sections = (
            [-(-count // self.block_tokens) for row in section for count in row]
            for section in self.sections
        )
        return list(map(sum, zip(*of_sections, strict=True)))

    @functools.cached_property
    def piece_blocks(self) -> int:
        """The number of blocks in each piece.

        It is the largest number that divides the blocks of every head. Attention takes a piece as a
        whole, so there are few long pieces and none holds two heads.
        """
        return max(1, math.gcd(*self.head_blocks))

    @functools.cached_property
    def piece_heads(self) -> Tensor | None:
        """The index of the head that each piece belongs to, counted over all rows.

        Shape: (P,) int64; None if each head is one piece.
        """
        n = self.piece_blocks
        return None if set(self.head_blocks) == {n} else self.heads[::n]

    @functools.cached_property
    def heads(self) -> Tensor:
        """The index of the head that each block belongs to, counted over all rows.

        Shape: (M,) int64.
        """
        with torch.inference_mode(False):  # a later caller may need gradients
            heads = [head for head, *_ in self._blocks]
            return on_device(heads, self.device)

    @functools.cached_property
    def hidden(self) -> tuple[Tensor, Tensor]:
        """The indices of all empty slots.

        They are two (K,) int64 tensors: the piece of each slot, and its place within the piece.
        """
        with torch.inference_mode(False):
            G, tokens = self.block_tokens, self.piece_blocks * self.block_tokens
            blocks = ((block, count) for block, (*_, count) in enumerate(self._blocks))
            empty = [block * G + slot for block, count in blocks for slot in range(count, G)]
            slots = on_device(empty, self.device)
            return slots // tokens, slots % tokens

    @functools.cached_property
    def table(self) -> tuple[Tensor, Tensor]:
        """The index of the first block of each head, and the number of tokens in each block.

        Shapes: (B * H + 1,), the last one is the end of the last head; and (M,).
        """
        with torch.inference_mode(False):
            begins = [0, *itertools.accumulate(self.head_blocks)]
            tokens = [count for *_, count in self._blocks]
            return (
                on_device(begins, self.device),
                on_device(tokens, self.device),
            )

    @property
    def flat(self) -> Tensor:
        """The index of the slot of each token, in the order in which ragged states hold the tokens.

        Shape: (N,) int64, indices of M * G slots.
        """
        tokens = torch.tensor([count for *_, count in self._blocks])
        slots = torch.arange(self.block_tokens)  # not on the device, which is not waited for
        return (slots < tokens.view(-1, 1)).flatten().nonzero()[:, 0].to(self.device)

    def rows(self, begins: Sequence[int]) -> Tensor:
        """Return the index of the token in each slot, if there is only one section.

        A slot without a token gets the row of the last token before it.

        Args:
            begins: where each head begins in flat states.

        Returns:
            (M, G) int64.
        """
        bounds = [[begins[head] + start, count - 1] for head, start, count in self._blocks]
        last = on_device(bounds, self.device).view(-1, 2, 1)
        within = torch.arange(self.block_tokens, device=self.device)
        return last[:, 0] + within.minimum(last[:, 1])

    def blocks_of_rows(self, rows: list[int]) -> Tensor:
        """Return the indices of all blocks in the given rows of the batch.

        Returns:
            (M',) int64, in the order of `rows`; repeated if a row is repeated.
        """
        H, begins = len(self.sections[0][0]), [0, *itertools.accumulate(self.head_blocks)]
        chosen = [block for row in rows for block in range(begins[row * H], begins[(row + 1) * H])]
        return on_device(chosen, self.device)

    def joined(self, section: HeadTokens) -> tuple["BlockLayout", Tensor]:
        """Add a section to the layout, and return the new layout and the order of its blocks.

        Args:
            section: tokens of each head in the new section.

        Returns:
            The new layout; and (M',) int64, for each of its blocks the index among the blocks of
            this layout, followed by those of the section.
        """
        more = BlockLayout((section,), self.block_tokens, self.device)
        order = torch.cat([self.heads, more.heads]).argsort(stable=True)
        return BlockLayout((*self.sections, section), self.block_tokens, self.device), order

    @functools.cached_property
    def _blocks(self) -> list[tuple[int, int, int]]:
        """The head, the first token and the number of tokens of each block.

        The first token is counted within the section.
        """
        sections = ([count for row in section for count in row] for section in self.sections)
        return [
            (head, start, min(self.block_tokens, count - start))
            for head, counts in enumerate(zip(*sections, strict=True))
            for count in counts
            for start in range(0, count, self.block_tokens)
        ]

    @property
    def nbytes(self) -> int:
        """The number of bytes of the tensors that attention needs.

        The table is included if a kernel has used it.
        """
        tensors = [self.heads, *self.hidden, *(self.table if "table" in vars(self) else ())]
        return sum(tensor.nbytes for tensor in tensors)
