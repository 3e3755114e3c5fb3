"""The append buffer of a recorded step, which stays in place so that the step can be replayed."""

import torch
from torch import Tensor

from snapkv.storage.tail import Pair, Tail


class LentTail(Tail):
    """A tail with a buffer that never moves, so that a captured step can be replayed.

    Attention reads the whole buffer and hides the slots that are not written yet. The number of
    written tokens is a tensor on the device, which a replayed step increases without Python.

    Args:
        keys: (B, H, S, D), the keys to hold.
        values: (B, H, S, Dv), their values.
        new_tokens: how many free slots the buffer has after them.
    """

    count: Tensor

    def __init__(self, keys: Tensor, values: Tensor, new_tokens: int) -> None:
        super().__init__(_in_buffer(keys, new_tokens), _in_buffer(values, new_tokens))
        self.count = torch.tensor(keys.shape[2], device=keys.device)

    @property
    def tokens(self) -> int:
        return int(self.count)

    @property
    def written(self) -> Pair:
        tokens = self.tokens
        return self.keys[:, :, :tokens], self.values[:, :, :tokens]

    def append(self, keys: Tensor, values: Tensor, *, in_place: bool = True) -> Pair:
        """Write new tokens into the next free slots, and return the whole buffers.

        The caller must make sure that there are enough free slots.

        Args:
            keys: (B, H, N, D).
            values: (B, H, N, Dv).
            in_place: ignored.

        Returns:
            The keys and values of all slots, including those that are not written yet.
        """
        del in_place  # always in place
        new_tokens = keys.shape[2]
        places = torch.arange(new_tokens, device=keys.device) + self.count
        self.count.add_(new_tokens)
        self.keys.index_copy_(2, places, keys)
        self.values.index_copy_(2, places, values)
        return self.keys, self.values

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
