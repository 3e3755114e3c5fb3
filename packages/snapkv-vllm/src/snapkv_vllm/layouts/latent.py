"""The layout of latent attention (MLA): token by token, one latent and rotated part for all heads.

The cache of a layer is (blocks, block_tokens, latent and rotated part). All of it meets the
queries, so it is read as keys; values are made of the same latent, and nothing is stored for them.
"""

from collections.abc import Sequence
from typing import Any

from snapkv_vllm.layouts.plain import PlainLayout


def layout(layers: Sequence[Any]) -> PlainLayout:
    """The layout of layers that are alike: one KV head whose values have no numbers."""
    return PlainLayout([layer.kv_cache.unsqueeze(1) for layer in layers], layers[0].head_size)
