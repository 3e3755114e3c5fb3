"""The CPU backend's layout: each block packed as the instruction set of the machine likes it.

How a block is packed is written down nowhere but in the kernel that writes it. So numbers that name
their own place are written with that kernel and looked for afterwards, once per kind of block.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops

from snapkv.errors import UnsupportedModelError

_DIGIT = 16  # every float format holds the whole numbers below it, and its square, exactly


class CpuLayout:
    """Reads through the measured packing, writes with the kernel.

    Args:
        cache: (blocks, Hkv, block_tokens, 2 * D).
        isa: vLLM's name of the packing.
    """

    def __init__(self, cache: Tensor, isa: str) -> None:
        blocks, heads, self._block_tokens, twice = cache.shape
        self._head_size = twice // 2
        halves = cache.view(blocks, heads, 2 * self._block_tokens, self._head_size).chunk(2, dim=2)
        self._keys, self._values = halves
        self._isa = isa

    def read_keys(self, blocks: Tensor, tokens: int) -> Tensor:
        """See `Layout`."""
        place, _ = self._places()
        heads = self._keys.shape[1]
        rows = self._keys[blocks].view(len(blocks), heads, -1)[..., place]
        rows = rows.view(len(blocks), heads, self._block_tokens, -1).transpose(0, 1)
        return rows.reshape(1, heads, -1, self._head_size)[:, :, :tokens]

    def read_values(self, blocks: Tensor, keep: Tensor) -> Tensor:
        """See `Layout`."""
        _, places = self._places()
        place = places.view(self._block_tokens, -1)[keep[0] % self._block_tokens]
        block = blocks[keep[0] // self._block_tokens][..., None]
        head = torch.arange(self._values.shape[1])[:, None, None]
        row, column = place // self._head_size, place % self._head_size
        return self._values[block, head, row, column][None]

    def _places(self) -> tuple[Tensor, Tensor]:
        return _places(self._isa, self._block_tokens, self._head_size, self._keys.dtype)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `Layout`."""
        by_token = [states[0].transpose(0, 1).contiguous() for states in (keys, values)]
        ops.cpu_attn_reshape_and_cache(*by_token, self._keys, self._values, slots, self._isa)


@functools.cache
def _places(
    isa: str, block_tokens: int, head_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Where the numbers of a block lie, for keys and for values: (block_tokens * D,) int64."""
    numbers = torch.arange(block_tokens * head_size)
    found = [torch.zeros_like(numbers), torch.zeros_like(numbers)]
    power = 1
    while power < numbers.numel():
        digits = (numbers // power % _DIGIT).to(dtype).view(block_tokens, 1, head_size)
        for half, packed in zip(found, _packed(digits, isa), strict=True):
            half += packed.flatten().long() * power
        power *= _DIGIT
    for half in found:
        if not torch.equal(half.sort().values, numbers):
            raise UnsupportedModelError(
                f"snapkv: expected the CPU backend to lay out a block by moving its numbers, got "
                f"something else for {isa} and {dtype}; serve the model in float32"
            )
    return found[0].argsort(), found[1].argsort()


def _packed(states: Tensor, isa: str) -> tuple[Tensor, Tensor]:
    """A block that holds (block_tokens, 1, D) both as keys and as values, as it lies in memory."""
    block_tokens, _, head_size = states.shape
    cache = torch.zeros(1, 1, 2 * block_tokens, head_size, dtype=states.dtype)
    keys, values = cache.chunk(2, dim=2)
    slots = torch.arange(block_tokens)
    ops.cpu_attn_reshape_and_cache(states, states.clone(), keys, values, slots, isa)
    return keys, values


def layout(layer: Any) -> CpuLayout:
    """The layout of a layer."""
    return CpuLayout(layer.kv_cache, layer.isa)
