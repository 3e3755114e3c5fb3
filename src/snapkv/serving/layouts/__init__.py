"""How attention backends lay out keys and values inside a block; one file per layout."""

import importlib
from typing import Any, Protocol, cast

from torch import Tensor

from snapkv.serving.refusals import LAYOUTS


class Layout(Protocol):
    """Reads and writes tokens of one layer's cache.

    Blocks are numbered along the first axis of the cache and tokens inside a block; a slot is
    ``block * block_tokens + token``.
    """

    def read_keys(self, blocks: Tensor, tokens: int) -> Tensor:
        """The keys of the first tokens in these blocks: a copy, (1, Hkv, T, D)."""

    def read_values(self, blocks: Tensor, keep: Tensor) -> Tensor:
        """The values of some tokens in these blocks: a copy, (1, Hkv, K, D).

        Args:
            blocks: as above.
            keep: (1, Hkv or 1, K) int64, which tokens of every head.
        """

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put (1, Hkv, K, D) keys and values into KV cache slots, the same for all heads."""


def layout_of(layer: Any) -> Layout:
    """The layout of one of vLLM's attention layers, once its cache is there."""
    module = importlib.import_module(LAYOUTS[layer.get_attn_backend().get_name()])
    return cast(Layout, module.layout(layer))
