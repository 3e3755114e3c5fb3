"""Rejected drafts are rolled back: behind a tree of candidates a cache keeps one path of it."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from snapkv.cache.layer import CompressedLayer


def keep_path(cache: Cache, path: Tensor, read_tokens: int) -> None:
    """Keep one path of the candidates that were read last, in every layer, and forget the others.

    Args:
        cache: any that can be cropped; `activate_past_recording` was called before the pass.
        path: (N,) int64 on the CPU, ascending places of the tokens to keep among those read.
        read_tokens: Q, how many tokens that pass read.
    """
    if not torch.equal(path, torch.arange(len(path))):
        for layer in cache.layers:
            if getattr(layer, "keys", None) is not None:
                _gather(layer, path, read_tokens)
    cache.crop(len(path) - read_tokens)


def _gather(layer: Any, path: Tensor, read_tokens: int) -> None:
    """Move the path's keys and values to the front of the tokens read."""
    end = layer.keys.shape[-2]
    if isinstance(layer, CompressedLayer):  # static storage has empty slots behind them
        end = min(end, layer.store.slots)
    start = end - read_tokens
    for states in (layer.keys, layer.values):
        kept = states[..., start:end, :].index_select(-2, path.to(states.device))
        states[..., start : start + len(path), :] = kept
