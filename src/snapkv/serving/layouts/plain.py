"""FlashAttention's and Triton's layout: token by token, keys and values side by side.

The cache of a layer is (blocks, Hkv, block_tokens, 2 * D), in whatever order it lies in memory.
"""

from typing import Any

import torch
from torch import Tensor


class PlainLayout:
    """Plain indexing.

    Args:
        cache: (blocks, Hkv, block_tokens, 2 * D).
        head_size: D.
    """

    def __init__(self, cache: Tensor, head_size: int) -> None:
        self._cache = cache
        self._head_size = head_size

    def read_keys(self, blocks: Tensor, tokens: int) -> Tensor:
        """See `Layout`."""
        rows = self._cache[..., : self._head_size][blocks]
        return rows.transpose(0, 1).flatten(1, 2)[None, :, :tokens]

    def read_values(self, blocks: Tensor, keep: Tensor) -> Tensor:
        """See `Layout`."""
        heads, block_tokens = self._cache.shape[1:3]
        head = torch.arange(heads, device=keep.device)[:, None]
        rows = self._cache[..., self._head_size :]
        return rows[blocks[keep[0] // block_tokens], head, keep[0] % block_tokens][None]

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `Layout`."""
        block_tokens = self._cache.shape[2]
        block, token = slots // block_tokens, slots % block_tokens
        by_token = self._cache.transpose(1, 2)  # a view: (blocks, block_tokens, Hkv, 2 * D)
        by_token[block, token, :, : self._head_size] = keys[0].transpose(0, 1)
        by_token[block, token, :, self._head_size :] = values[0].transpose(0, 1)


def layout(layer: Any) -> PlainLayout:
    """The layout of a layer."""
    return PlainLayout(layer.kv_cache, layer.head_size)
