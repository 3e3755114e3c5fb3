"""FlashAttention's and Triton's layout: token by token, keys and values side by side.

The cache of a layer is (blocks, Hkv, block_tokens, 2 * D), in whatever order it lies in memory.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from snapkv.ops import gather_tokens


class PlainLayout:
    """Plain indexing.

    Args:
        caches: of each layer, (blocks, Hkv, block_tokens, 2 * D).
        head_size: D.
    """

    def __init__(self, caches: Sequence[Tensor], head_size: int) -> None:
        self._caches = caches
        self._head_size = head_size

    def part(self, layers: slice) -> Self:
        """See `Layout`."""
        return type(self)(self._caches[layers], self._head_size)

    def read_keys(self, blocks: Tensor, tokens: int) -> Tensor:
        """See `Layout`."""
        every = torch.arange(tokens, device=blocks.device).expand(len(self._caches), 1, tokens)
        return self._read(slice(None, self._head_size), blocks, every)

    def pick(self, keys: Tensor, keep: Tensor) -> Tensor:
        """See `Layout`."""
        return gather_tokens(keys, keep)

    def read_values(self, blocks: Tensor, keep: Tensor) -> Tensor:
        """See `Layout`."""
        return self._read(slice(self._head_size, None), blocks, keep)

    def _read(self, half: slice, blocks: Tensor, tokens: Tensor) -> Tensor:
        heads, block_tokens = self._caches[0].shape[1:3]
        head = torch.arange(heads, device=blocks.device)[:, None]
        block, place = blocks[tokens // block_tokens], tokens % block_tokens
        return torch.stack(
            [
                cache[..., half][block[layer], head, place[layer]]
                for layer, cache in enumerate(self._caches)
            ]
        )

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `Layout`."""
        block_tokens = self._caches[0].shape[2]
        block, token = slots // block_tokens, slots % block_tokens
        by_token = torch.cat([keys, values], dim=-1).transpose(1, 2)  # (layers, K, Hkv, 2 * D)
        for cache, states in zip(self._caches, by_token, strict=True):
            cache.transpose(1, 2)[block, token] = states


def layout(layers: Sequence[Any]) -> PlainLayout:
    """The layout of layers that are alike."""
    return PlainLayout([layer.kv_cache for layer in layers], layers[0].head_size)
