"""The append buffer: tokens go after stored ones without copying those for every token."""

import weakref
from typing import Any

import torch
from torch import Tensor

ROOM_TOKENS = 64
"""Tokens that there is room for after those that had to be copied."""


def slots_behind(stored_tokens: int, new_tokens: int) -> int:
    """Slots of a buffer when that many tokens have come one by one after those that are stored."""
    rounds = -(-new_tokens // (ROOM_TOKENS + 1))
    return stored_tokens + rounds * (ROOM_TOKENS + 1)


class AppendBuffer:
    """Appends to (B, H, S, D) states, in place as long as there is room after them.

    What it hands out are views of the first slots of a buffer. It writes after the last of them
    only: what was handed out before stays as it is, and whatever else is given to it is copied to
    where there is room. It holds no tensor itself, and layers may share it.
    """

    def __init__(self) -> None:
        self._last: weakref.ref[Tensor] | None = None
        self._stored = self._slots = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy begins again: of what was handed out only one may be written after."""
        return AppendBuffer, ()

    def append(self, stored: Tensor, new: Tensor) -> Tensor:
        """(B, H, S + N, D): the new states after the others."""
        B, H, tokens, D = new.shape
        if tokens > ROOM_TOKENS or not _fits_in_place(stored, new):
            return torch.cat([stored, new], dim=-2)
        is_last = self._last is not None and self._last() is stored
        if not is_last or self._stored + tokens > self._slots:
            self._stored = stored.shape[2]
            self._slots = self._stored + tokens + ROOM_TOKENS
            stored = stored.new_empty(B, H, self._slots, D)[:, :, : self._stored].copy_(stored)
        strides, begin = stored.stride(), self._stored * D
        stored.as_strided(new.shape, strides, begin).copy_(new)
        self._stored += tokens
        grown = stored.as_strided((B, H, self._stored, D), strides)
        self._last = weakref.ref(grown)
        return grown


def _fits_in_place(stored: Tensor, new: Tensor) -> bool:
    """Whether they differ in tokens alone, and nothing would miss that a tensor changes.

    A query may need what it saw.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if stored.is_inference() and not torch.is_inference_mode_enabled():
        return False
    if stored.dtype != new.dtype or stored.device != new.device:
        return False
    B, H, _, D = stored.shape
    return new.shape == (B, H, new.shape[2], D)
