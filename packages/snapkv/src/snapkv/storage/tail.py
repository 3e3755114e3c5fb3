"""The append buffer, which takes new tokens without copying the stored ones for every token."""

from typing import Any

import torch
from torch import Tensor

ROOM_TOKENS = 64
"""The number of free slots in a buffer to which all tokens were copied."""

Pair = tuple[Tensor, Tensor]
"""Keys (B, H, S, D) and values (B, H, S, Dv)."""


class Tail:
    """The keys and values of the last tokens, in a buffer to which new tokens are appended.

    The tensors it returns are views of the first slots of buffers. It only writes after the last of
    these slots, so tensors that it returned before do not change. Tensors that were passed to
    `hold` are copied to a buffer with free slots at the next append.

    Args:
        keys: (B, H, S, D), None while empty.
        values: (B, H, S, Dv).

    Attributes:
        keys: (B, H, S, D), the keys that are passed to attention; None while empty.
        values: (B, H, S, Dv), the values that are passed to attention; None while empty.
        count: () int64 on the device, how many of the S slots have been written, if a buffer has
            more slots; None otherwise, and outside of a forward pass.
    """

    count: Tensor | None = None

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        self.keys: Any = keys
        self.values: Any = values
        self._room = 0

    @property
    def tokens(self) -> int:
        """The number of tokens in the tail."""
        return 0 if self.keys is None else int(self.keys.shape[2])

    @property
    def written(self) -> Pair:
        """The keys and values of the tokens that have been written."""
        return self.keys, self.values

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Replace the keys and values of the tail by the given tensors, without a copy."""
        self.keys, self.values, self._room = keys, values, 0

    def begin(self, keys: Tensor, values: Tensor, coming: int) -> Pair:
        """Copy the first tokens into a new buffer, and return their keys and values.

        Args:
            keys: (B, H, N, D).
            values: (B, H, N, Dv).
            coming: how many free slots the buffer has after them; none if gradients are enabled.

        Returns:
            The keys and values in the buffer, in the shapes of the arguments.
        """
        self._room = 0 if torch.is_grad_enabled() else coming
        if self._room:
            self.keys, self.values = self._with_room(keys), self._with_room(values)
        else:
            self.keys = keys.clone(memory_format=torch.contiguous_format)
            self.values = values.clone(memory_format=torch.contiguous_format)
        return self.keys, self.values

    def append(self, keys: Tensor, values: Tensor, *, in_place: bool = True) -> Pair:
        """Store new tokens, and return the keys and values of all tokens.

        The new tokens are the last ones. If the buffer has no room, everything is copied to a
        larger one.

        Args:
            keys: (B, H, N, D).
            values: (B, H, N, Dv).
            in_place: whether to write into the buffer if it has free slots.

        Returns:
            (B, H, S + N, D) keys and (B, H, S + N, Dv) values.
        """
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
        """Remove the last `tokens` tokens."""
        left = self.tokens - tokens
        self.hold(self.keys[:, :, :left], self.values[:, :, :left])

    def columns(self, new_tokens: int) -> int:
        """Return how many slots attention will read after `new_tokens` more tokens."""
        return self.tokens + new_tokens

    def _takes_in_place(self, keys: Tensor, values: Tensor) -> bool:
        """Return whether the new tokens can be written into the buffer, or a larger copy of it.

        They must have the dtype, the device and, except for the number of tokens, the shape of the
        stored tokens. Gradients must be disabled, and there must not be more new tokens than free
        slots, or than `ROOM_TOKENS` if this is larger. A buffer that was made in inference mode can
        be written in inference mode only.
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
        B, H, S, D = stored.shape
        return stored.new_empty(B, H, S + self._room, D)[:, :, :S].copy_(stored)

    def __copy__(self) -> "Tail":
        """Return a copy of the tail that can be changed independently.

        Only the original may write into the buffer.
        """
        return Tail(self.keys, self.values)
