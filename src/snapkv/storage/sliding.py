"""Layers that slide over a window stay transformers' own, but for what they hold beside it."""

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer


def let_go_of_the_past(layer: CacheLayerMixin, new_tokens: int) -> None:
    """Have a layer hold its window alone when many tokens have come in one pass.

    transformers keeps the last tokens as a view of all that were there, which stay in memory until
    the next pass: behind a long prompt, the whole prompt in every such layer.
    """
    if not isinstance(layer, DynamicSlidingWindowLayer) or torch.compiler.is_compiling():
        return
    if layer.keys is not None and new_tokens > layer.keys.shape[-2]:
        layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
