"""How attention backends lay out keys and values inside a block; one file per layout."""

import importlib
from collections.abc import Sequence
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor

from snapkv_vllm.refusals import LAYOUTS


class Layout(Protocol):
    """Reads and writes tokens of the caches of a few layers that are alike.

    Blocks are numbered along the first axis of a cache and tokens inside a block; a slot is
    ``block * block_tokens + token``. In what is read and written, the layers are rows of a batch,
    so that a step takes as few operations as can be.
    """

    def part(self, layers: slice) -> Self:
        """The same for some of the layers."""

    def read_keys(self, blocks: Tensor, tokens: int) -> Tensor:
        """The keys of the first tokens in these blocks: a copy, (layers, Hkv, T, D)."""

    def pick(self, keys: Tensor, keep: Tensor) -> Tensor:
        """Some of the keys that were read, (layers, Hkv, K, D), of every head those of `keep`."""

    def read_values(self, blocks: Tensor, keep: Tensor) -> Tensor:
        """The values of some tokens in these blocks: a copy, (layers, Hkv, K, D).

        Args:
            blocks: as above.
            keep: (layers, Hkv or 1, K) int64, which tokens of every head.
        """

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put (layers, Hkv, K, D) keys and values into KV cache slots, the same for all heads."""


def layout_of(layers: Sequence[Any]) -> Layout:
    """The layout of some of vLLM's attention layers that are alike, once their caches are there."""
    module = importlib.import_module(LAYOUTS[layers[0].get_attn_backend().get_name()])
    return cast(Layout, module.layout(layers))


def slots(blocks: Tensor, tokens: int, block_tokens: int) -> Tensor:
    """The KV cache slots of the first tokens that lie in these blocks."""
    within = torch.arange(block_tokens, device=blocks.device)
    return (blocks[:, None] * block_tokens + within).flatten()[:tokens]
