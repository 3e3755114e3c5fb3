"""The tail of a store: keys and values of tokens after which more are appended."""

from typing import Any, Protocol

import torch
from torch import Tensor

from snapkv.storage.append_buffer import AppendBuffer

Pair = tuple[Tensor, Tensor]
"""Keys (B, H, S, D) and values (B, H, S, Dv)."""


class Tail(Protocol):
    """Keys and values of tokens that come one after the other."""

    @property
    def keys(self) -> Any:
        """(B, H, S, D), what attention is handed; None while empty."""

    @property
    def values(self) -> Any:
        """(B, H, S, Dv), likewise."""

    @property
    def count(self) -> Tensor | None:
        """() int64, how many of the S are written, where only the device is to know; else None."""

    @property
    def tokens(self) -> int:
        """How many tokens it holds."""

    @property
    def written(self) -> Pair:
        """Keys and values of those."""

    def append(self, keys: Tensor, values: Tensor) -> Pair:
        """Store (B, H, N, D) new tokens; returns what attention is handed, they are last."""

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Hold these from now on, in the place of the others."""

    def crop(self, tokens: int) -> None:
        """Forget the last ones."""

    def columns(self, new_tokens: int) -> int:
        """Tokens that attention is handed when so many more have been appended."""

    def settled(self, heads: Any) -> Any:
        """What heads hold, `HeadStates`, where the tail lies: with room for more if that has."""


class GrowingTail:
    """Grows with every token: into a buffer with some room, which is made anew where that is used.

    Args:
        keys: None while empty.
        values: likewise.
        in_place: append after what is stored without copying it every time. Not where all of it is
            moved at every step anyway.
    """

    count = None

    def __init__(self, keys: Tensor | None, values: Tensor | None, *, in_place: bool) -> None:
        self.keys: Any = keys
        self.values: Any = values
        self.in_place = in_place
        self._buffers = AppendBuffer(), AppendBuffer()

    @property
    def tokens(self) -> int:
        return 0 if self.keys is None else int(self.keys.shape[2])

    @property
    def written(self) -> Pair:
        return self.keys, self.values

    def append(self, keys: Tensor, values: Tensor) -> Pair:
        if not self.in_place:
            keys = torch.cat([self.keys, keys], dim=2)
            values = torch.cat([self.values, values], dim=2)
        else:
            of_keys, of_values = self._buffers
            keys, values = of_keys.append(self.keys, keys), of_values.append(self.values, values)
        self.keys, self.values = keys, values
        return keys, values

    def hold(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def crop(self, tokens: int) -> None:
        left = self.tokens - tokens
        self.hold(self.keys[:, :, :left], self.values[:, :, :left])

    def columns(self, new_tokens: int) -> int:
        return self.tokens + new_tokens

    def settled(self, heads: Any) -> Any:
        return heads

    def __copy__(self) -> "GrowingTail":
        """One that goes on by itself: only one may write after what both hold."""
        return GrowingTail(self.keys, self.values, in_place=self.in_place)
