"""The append buffer of a recorded step, which stays in place so that the step can be replayed."""

import torch
from torch import Tensor

from snapkv.storage.tail import Pair, Tail


class LentTail(Tail):
    """Holds tokens in buffers with room, whole buffers of which attention is handed.

    The number of written tokens is a tensor that a replayed step increases by itself. Ragged
    attention hides the slots that are not written.

    Args:
        keys: (B, H, S, D), the keys to hold.
        values: (B, H, S, Dv), their values.
        new_tokens: how many tokens there is room for after them.
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
        del in_place  # always in place
        new_tokens = keys.shape[2]
        places = torch.arange(new_tokens, device=keys.device) + self.count
        self.count.add_(new_tokens)
        self.keys.index_copy_(2, places, keys)
        self.values.index_copy_(2, places, values)
        return self.keys, self.values

    def columns(self, new_tokens: int) -> int:
        """Return the number of all slots, written or not."""
        del new_tokens
        return int(self.keys.shape[2])

    def __copy__(self) -> "LentTail":
        """Return the tail itself: a branch leaves the room at once."""
        return self


def _in_buffer(states: Tensor, new_tokens: int) -> Tensor:
    """Copy the states into a buffer whose other slots are zero.

    Zeros, because a weight of zero does not hide NaN.
    """
    B, H, S, D = states.shape
    buffer = states.new_zeros(B, H, S + new_tokens, D)
    buffer[:, :, :S] = states
    return buffer
