"""A layer's cache as pages of one head."""

import math
from dataclasses import dataclass
from typing import Self

from torch import Tensor


@dataclass(frozen=True)
class HeadPages:
    """The cache of a layer, in which each block is as many pages as there are KV heads.

    Attributes:
        cache: (pages, 1, block_tokens, 2 * D), a view; where the tokens of a block lie before its
            heads in memory, pages overlap, and most numbers belong to no head of a block.
        of_block: how far the number of a page moves from block to block.
        of_head: the same from head to head.
        heads: KV heads of a block.
    """

    cache: Tensor
    of_block: int
    of_head: int
    heads: int

    @classmethod
    def of(cls, cache: Tensor) -> Self:
        """Of (blocks, Hkv, block_tokens, 2 * D), in whatever order it lies in memory."""
        blocks, heads, tokens, size = cache.shape
        block, head, token, number = cache.stride()
        step = math.gcd(block, head) if heads > 1 else block
        of_block, of_head = block // step, head // step if heads > 1 else 0
        pages = (blocks - 1) * of_block + (heads - 1) * of_head + 1
        view = cache.as_strided((pages, 1, tokens, size), (step, step, token, number))
        return cls(view, of_block, of_head, heads)

    def numbers(self, blocks: Tensor, places: Tensor) -> Tensor:
        """The numbers of pages at some places, each in its block."""
        return blocks * self.of_block + places % self.heads * self.of_head
