"""The append buffer: tokens go after stored ones without copying those for every token."""

from typing import Any

import torch
from torch import Tensor

ROOM_TOKENS = 64
"""Tokens that there is room for after those that had to be copied."""

Pair = tuple[Tensor, Tensor]
"""Keys (B, H, S, D) and values (B, H, S, Dv)."""


def slots_behind(stored_tokens: int, new_tokens: int) -> int:
    """Slots of a buffer when that many tokens have come one by one after those that are stored."""
    rounds = -(-new_tokens // (ROOM_TOKENS + 1))
    return stored_tokens + rounds * (ROOM_TOKENS + 1)


class Tail:
    """Keys and values of tokens that more are appended to, in place as long as there is room.

    What it hands out are views of the first slots of buffers. It writes after the last of them
    only: what was handed out before stays as it is, and what it is given to hold is copied to where
    there is room.

    Args:
        keys: (B, H, S, D), None while empty.
        values: (B, H, S, Dv).

    Attributes:
        keys: what attention is handed, likewise `values`.
        count: () int64, how many of the S are written, where only the device is to know; None where
            all are.
    """

    count: Tensor | None = None

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        self.keys: Any = keys
        self.values: Any = values
        self._room = 0

    @property
    def tokens(self) -> int:
        """How many it holds."""
        return 0 if self.keys is None else int(self.keys.shape[2])

    @property
    def written(self) -> Pair:
        """Keys and values of those."""
        return self.keys, self.values

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Hold these from now on, in the place of the others."""
        self.keys, self.values, self._room = keys, values, 0

    def begin(self, keys: Tensor, values: Tensor, coming: int) -> Pair:
        """Hold a copy of the first tokens, with room for those that are known to come."""
        self._room = 0 if torch.is_grad_enabled() else coming
        if self._room:
            self.keys, self.values = self._with_room(keys), self._with_room(values)
        else:
            self.keys = keys.clone(memory_format=torch.contiguous_format)
            self.values = values.clone(memory_format=torch.contiguous_format)
        return self.keys, self.values

    def append(self, keys: Tensor, values: Tensor, *, in_place: bool = True) -> Pair:
        """Store (B, H, N, D) new tokens; returns what attention is handed, they are last."""
        tokens = keys.shape[2]
        if not in_place or not self._takes_in_place(keys, values):
            whole = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
            self.hold(*whole)
            return whole
        if self._room < tokens:
            self._room = tokens + ROOM_TOKENS
            self.keys, self.values = map(self._with_room, (self.keys, self.values))
        self._room -= tokens
        written = []
        for stored, new in ((self.keys, keys), (self.values, values)):
            (B, H, S, D), strides = stored.shape, stored.stride()
            stored.as_strided(new.shape, strides, S * D).copy_(new)
            written.append(stored.as_strided((B, H, S + tokens, D), strides))
        self.keys, self.values = written
        return self.keys, self.values

    def truncate(self, tokens: int) -> None:
        """Forget the last `tokens` tokens."""
        left = self.tokens - tokens
        self.hold(self.keys[:, :, :left], self.values[:, :, :left])

    def columns(self, new_tokens: int) -> int:
        """Tokens that attention is handed when so many more have been appended."""
        return self.tokens + new_tokens

    def _takes_in_place(self, keys: Tensor, values: Tensor) -> bool:
        """Whether they differ in tokens alone, and nothing would miss that a tensor changes.

        A query may need what it saw.
        """
        if torch.is_grad_enabled() or keys.shape[2] > max(ROOM_TOKENS, self._room):
            return False
        if self.keys.is_inference() and not torch.is_inference_mode_enabled():
            return False
        for stored, new in ((self.keys, keys), (self.values, values)):
            B, H, _, D = stored.shape
            if stored.dtype != new.dtype or stored.device != new.device:
                return False
            if new.shape != (B, H, keys.shape[2], D):
                return False
        return True

    def _with_room(self, stored: Tensor) -> Tensor:
        """The first slots of a new buffer, filled with what is stored."""
        B, H, S, D = stored.shape
        return stored.new_empty(B, H, S + self._room, D)[:, :, :S].copy_(stored)

    def __copy__(self) -> "Tail":
        """One that goes on by itself: only one may write after what both hold."""
        return Tail(self.keys, self.values)
