"""Appending tokens behind stored ones without copying those for every token."""

import weakref
from typing import Any

import torch
from torch import Tensor

ROOM_TOKENS = 64
"""Tokens that there is room for behind those that had to be copied."""


class Growing:
    """Appends to (B, H, S, D) states, in place as long as there is room behind them.

    What it hands out are views of the first slots of a buffer. It writes behind the last of them
    only: what was handed out before stays as it is, and whatever else is given to it is copied to
    where there is room. It holds no tensor itself, and layers may share it.
    """

    def __init__(self) -> None:
        self._last: weakref.ref[Tensor] | None = None
        self._slots = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy begins anew: of what was handed out only one may be written behind."""
        return Growing, ()

    def append(self, stored: Tensor, new: Tensor) -> Tensor:
        """Both, one behind the other.

        Args:
            stored: (B, H, S, D).
            new: (B, H, N, D).
        """
        if not _may_be_written_behind(stored, new):
            return torch.cat([stored, new], dim=-2)
        tokens, end = new.shape[-2], stored.shape[-2] + new.shape[-2]
        if self._last is None or self._last() is not stored or end > self._slots:
            stored = self._with_room(stored, end + ROOM_TOKENS)
        grown = stored.as_strided((*stored.shape[:2], end, stored.shape[3]), stored.stride())
        grown.narrow(2, end - tokens, tokens).copy_(new)
        self._last = weakref.ref(grown)
        return grown

    def _with_room(self, stored: Tensor, slots: int) -> Tensor:
        """The first slots of a new buffer, filled with what is stored."""
        B, H, S, D = stored.shape
        first = stored.new_empty(B, H, slots, D)[:, :, :S]
        first.copy_(stored)
        self._slots = slots
        return first


def _may_be_written_behind(stored: Tensor, new: Tensor) -> bool:
    """Whether it says the same as concatenation, and nothing would miss that a tensor changes."""
    if stored.dtype != new.dtype or stored.device != new.device or torch.compiler.is_compiling():
        return False
    B, H, N, D = new.shape
    if N > ROOM_TOKENS or stored.shape != (B, H, stored.shape[2], D):
        return False
    if torch.is_grad_enabled():
        return False  # a query may need the gradient of what it saw
    return torch.is_inference_mode_enabled() or not stored.is_inference()
