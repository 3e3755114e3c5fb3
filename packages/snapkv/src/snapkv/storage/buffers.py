"""Buffers that stay where they are from one prompt to the next."""

import torch
from torch import Tensor


class Buffers:
    """Tensors by name, made when they are first wanted and used again as long as they fit.

    They are made again for another batch, dtype or device, and where more is to be held.
    """

    def __init__(self) -> None:
        self._rows = 0
        self._held: dict[str, Tensor] = {}
        self._most: dict[str, int] = {}

    def begin(self, rows: int) -> None:
        """Have no buffers of another batch."""
        if rows != self._rows:
            self._rows, self._held, self._most = rows, {}, {}

    def most(self, name: str, count: int) -> int:
        """The largest number of that name so far, this one included."""
        self._most[name] = max(count, self._most.get(name, 0))
        return self._most[name]

    def hold(self, name: str, states: Tensor, slots: int | None = None, axis: int = 0) -> Tensor:
        """The buffer of that name, which holds the states and zeros after them.

        It has that many slots along an axis, or as many as the states.
        """
        shape = list(states.shape)
        buffer = self._held.get(name)
        if slots is not None:
            shape[axis] = slots
        if buffer is None or not _is_such(buffer, states, shape):
            with torch.inference_mode(False):  # or it could be changed in that mode only
                buffer = torch.empty(shape, dtype=states.dtype, device=states.device)
            torch._dynamo.mark_static_address(buffer)  # or CUDA graphs would copy it every step
            self._held[name] = buffer
        if slots is None:
            return buffer.copy_(states)
        tokens = states.shape[axis]
        buffer.narrow(axis, tokens, slots - tokens).zero_()
        buffer.narrow(axis, 0, tokens).copy_(states)
        return buffer


def _is_such(buffer: Tensor, states: Tensor, shape: list[int]) -> bool:
    alike = buffer.dtype == states.dtype and buffer.device == states.device
    return alike and list(buffer.shape) == shape
