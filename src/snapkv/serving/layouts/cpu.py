"""The CPU backend's layout: each block packed as the instruction set of the machine likes it.

How a block is packed is written down nowhere but in the kernel that writes it. So numbers that name
their own place are written with that kernel and looked for afterwards, once per kind of block.
"""

import functools
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from vllm import _custom_ops as ops

from snapkv.errors import UnsupportedModelError
from snapkv.ops import gather_tokens

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
        return self._unpacked(self._keys[blocks], self._packings()[0])[:, :, :tokens]

    def read_values(self, blocks: Tensor, keep: Tensor) -> Tensor:
        """See `Layout`."""
        return gather_tokens(self._unpacked(self._values[blocks], self._packings()[1]), keep)

    def _packings(self) -> "tuple[_Packing, _Packing]":
        return _packings(self._isa, self._block_tokens, self._head_size, self._keys.dtype)

    def _unpacked(self, packed: Tensor, packing: "_Packing") -> Tensor:
        """Blocks as they lie in memory, (blocks, Hkv, block_tokens, D), as (1, Hkv, T, D)."""
        by_head = packed.flatten(2).transpose(0, 1)
        if packing.strides is None:
            rows = by_head[..., packing.places]
        else:
            sizes = (*by_head.shape[:2], *packing.sizes)
            rows = by_head.as_strided(sizes, (*by_head.stride()[:2], *packing.strides))
        return rows.reshape(1, by_head.shape[0], -1, self._head_size)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `Layout`."""
        by_token = [states[0].transpose(0, 1).contiguous() for states in (keys, values)]
        ops.cpu_attn_reshape_and_cache(*by_token, self._keys, self._values, slots, self._isa)


@dataclass(frozen=True)
class _Packing:
    """Where the numbers of a block lie, token by token.

    Attributes:
        places: (block_tokens * D,) int64.
        sizes: lengths of axes whose product that is, from the tokens down to the head's numbers.
        strides: of these axes in memory, where that is all there is to say; copying by them is
            several times faster than looking up every place.
    """

    places: Tensor
    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None

    @classmethod
    def of(cls, places: Tensor, block_tokens: int, head_size: int) -> Self:
        """Tell whether the places are those of axes as short as can be."""
        sizes = (*_factors(block_tokens), *_factors(head_size))
        strides, described, step = [], places[:1], places.numel()
        for size in sizes:
            step //= size
            strides.append(int(places[step] - places[0]))
            described = (described[:, None] + torch.arange(size) * strides[-1]).flatten()
        simple = int(places[0]) == 0 and torch.equal(described, places)
        return cls(places, sizes, tuple(strides) if simple else None)


def _factors(number: int) -> list[int]:
    """Prime factors, the largest first."""
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found[::-1]


@functools.cache
def _packings(
    isa: str, block_tokens: int, head_size: int, dtype: torch.dtype
) -> tuple[_Packing, _Packing]:
    """How keys and values are packed."""
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
    keys, values = (_Packing.of(half.argsort(), block_tokens, head_size) for half in found)
    return keys, values


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
