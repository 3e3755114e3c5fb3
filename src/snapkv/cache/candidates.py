"""Candidates that branch: who sees whom while they are verified, and which of them stay.

A forward pass may read a tree of candidate tokens instead of a text. Attention then hides the
branches from each other; which token sees which is left here, per thread, for the attention calls
of that pass. Behind it only one path is kept, in every layer and whatever it stores.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from snapkv.cache.static import StaticCompressedLayer

_current = threading.local()


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """The tree of candidates that a forward pass reads.

    Attributes:
        visible: (Q, Q) bool, which of the Q tokens of the pass each of them sees.
        masks: what a layer has made of the model's mask, for the layers behind it.
    """

    visible: Tensor
    masks: dict[Any, Any] = field(default_factory=dict, repr=False)


@contextlib.contextmanager
def verifying(visible: Tensor) -> Iterator[None]:
    """Within this block, forward passes of this thread read a tree of candidates.

    Args:
        visible: (Q, Q) bool, which of the Q tokens of the pass each of them sees: itself and its
            ancestors, which stand before it.
    """
    _current.candidates = Candidates(visible=visible)
    try:
        yield
    finally:
        _current.candidates = None


def current_candidates() -> Candidates | None:
    """The tree that this thread's forward pass reads; None for plain text."""
    return getattr(_current, "candidates", None)


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
    fixed = isinstance(layer, StaticCompressedLayer) and layer.fixed
    end = layer.stored_tokens if fixed else layer.keys.shape[-2]
    start = end - read_tokens
    for states in (layer.keys, layer.values):
        kept = states[..., start:end, :].index_select(-2, path.to(states.device))
        states[..., start : start + len(path), :] = kept
