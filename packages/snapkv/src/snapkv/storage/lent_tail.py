"""The append buffer of a captured pass, which stays in place so that the pass can be replayed."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from snapkv.storage.tail import Pair, Tail


class UsedSlots:
    """Counts the tokens in the append buffers of all layers, on the host and on the device.

    A captured pass reads the number on the device. Python has a number of its own, so that it does
    not wait for the device.

    Args:
        slots: how many free slots each append buffer has at first.
        device: the device of the buffers.

    Attributes:
        slots: how many free slots each append buffer has at first.
        on_device: () int64, how many of them the passes that have ended have written.
        drafts: how many of the last tokens are from a pass over several tokens, after which some of
            them may be removed; 0 after a pass over one token.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.slots, self.drafts = slots, 0
        self.on_device = torch.zeros((), dtype=torch.int64, device=device)
        self._tokens: int | None = 0

    @property
    def tokens(self) -> int:
        """The number of tokens that the passes that have ended have written into each buffer."""
        # During a pass, this reads from the device. So a model that asks for the number while it
        # is captured is noticed; otherwise the number would be frozen in the captured pass.
        return int(self.on_device) if self._tokens is None else self._tokens

    @contextlib.contextmanager
    def counting(self, tokens: int) -> Iterator[None]:
        """Count the `tokens` tokens that the forward pass in this block writes, unless it fails."""
        used, self._tokens = self.tokens, None
        yield
        self.on_device.add_(tokens)
        self._tokens, self.drafts = used + tokens, tokens if tokens > 1 else 0

    def remove(self, tokens: int) -> None:
        """Count the last `tokens` tokens as removed."""
        self._tokens, self.drafts = self.tokens - tokens, self.drafts - tokens
        self.on_device.sub_(tokens)


class LentTail(Tail):
    """A tail with a buffer that never moves, so that a captured pass can be replayed.

    Attention reads the whole buffer and hides the slots that are not written yet. The number of
    written tokens is a tensor on the device, so that a pass can be replayed without Python.

    Args:
        keys: (B, H, S, D), the keys to hold.
        values: (B, H, S, Dv), their values.
        used: counts the tokens that are written after them; it also says how many free slots the
            buffer has at first.
    """

    def __init__(self, keys: Tensor, values: Tensor, used: UsedSlots) -> None:
        super().__init__(_in_buffer(keys, used.slots), _in_buffer(values, used.slots))
        self._first, self._used = keys.shape[2], used

    @property
    def tokens(self) -> int:
        if self.count is not None:  # the pass that runs now has appended its tokens
            return int(self.count)
        return self._first + self._used.tokens

    @property
    def start(self) -> Tensor:
        """The number of tokens before the forward pass that runs now, () int64 on the device."""
        return self._used.on_device + self._first

    @property
    def drafts(self) -> int:
        """How many of the last tokens may be rejected; see the attributes of `UsedSlots`."""
        return self._used.drafts

    @property
    def written(self) -> Pair:
        tokens = self.tokens
        return self.keys[:, :, :tokens], self.values[:, :, :tokens]

    def append(self, keys: Tensor, values: Tensor, *, in_place: bool = True) -> Pair:
        """Write new tokens into the next free slots, and return the whole buffers.

        The caller must make sure that there are enough free slots. When the pass ends, it must
        count the tokens in `UsedSlots` and set `count` to None.

        Args:
            keys: (B, H, N, D).
            values: (B, H, N, Dv).
            in_place: ignored.

        Returns:
            The keys and values of all slots, including those that are not written yet.
        """
        del in_place  # always in place
        new_tokens = keys.shape[2]
        self.count = self._used.on_device + (self._first + new_tokens)
        places = self.count + torch.arange(-new_tokens, 0, device=keys.device)
        self.keys.index_copy_(2, places, keys)
        self.values.index_copy_(2, places, values)
        return self.keys, self.values

    def clear(self, slots: int) -> None:
        """Fill the next `slots` free slots with zeros, after tokens were removed from them.

        The weight of a free slot is zero, which does not hide a NaN.
        """
        for states in (self.keys, self.values):
            states[:, :, self.tokens : self.tokens + slots] = 0

    def columns(self, new_tokens: int) -> int:
        """Return the number of slots in the buffer, including those that are not written yet."""
        del new_tokens
        return int(self.keys.shape[2])

    def __copy__(self) -> "LentTail":
        """Return the tail itself, because a copied store leaves the buffer at once."""
        return self


def _in_buffer(states: Tensor, new_tokens: int) -> Tensor:
    """Copy the states into a larger buffer that is filled with zeros.

    The unused slots must be zero, because a weight of zero does not hide NaN.

    Args:
        states: (B, H, S, D).
        new_tokens: how many free slots the buffer has.

    Returns:
        (B, H, S + new_tokens, D).
    """
    B, H, S, D = states.shape
    buffer = states.new_zeros(B, H, S + new_tokens, D)
    buffer[:, :, :S] = states
    return buffer
