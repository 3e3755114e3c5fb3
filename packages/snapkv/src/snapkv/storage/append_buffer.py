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
        tokens = new.shape[2]
        if tokens > ROOM_TOKENS or not _in_place(stored) or not _alike(stored, new):
            return torch.cat([stored, new], dim=-2)
        is_last = self._last is not None and self._last() is stored
        if not is_last or self._stored + tokens > self._slots:
            self._stored = stored.shape[2]
            self._slots = self._stored + tokens + ROOM_TOKENS
            stored = _with_room(stored, self._slots)
        grown = _grown(stored, self._stored, new)
        self._last, self._stored = weakref.ref(grown), self._stored + tokens
        return grown


def _in_place(stored: Tensor) -> bool:
    """Whether nothing would miss that a tensor changes: a query may need what it saw."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return torch.is_inference_mode_enabled() or not stored.is_inference()


def _alike(stored: Tensor, new: Tensor) -> bool:
    """Whether they differ in the number of tokens at most."""
    B, H, _, D = stored.shape
    same_kind = stored.dtype == new.dtype and stored.device == new.device
    return same_kind and new.shape == (B, H, new.shape[2], D)


def _with_room(stored: Tensor, slots: int) -> Tensor:
    """The first slots of a new buffer, filled with what is stored."""
    B, H, S, D = stored.shape
    return stored.new_empty(B, H, slots, D)[:, :, :S].copy_(stored)


def _grown(first: Tensor, stored: int, new: Tensor) -> Tensor:
    """The first slots of a buffer and those after them, which hold new tokens from now on."""
    B, H, N, D = new.shape
    strides = first.stride()
    first.as_strided(new.shape, strides, stored * D).copy_(new)
    return first.as_strided((B, H, stored + N, D), strides)
