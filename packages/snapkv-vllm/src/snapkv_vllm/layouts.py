"""How attention backends lay out keys and values inside a block.

Blocks are numbered along the first axis of a cache, and tokens inside a block. A slot is ``block *
block_tokens + token``. Layers that are alike are read and written as rows of a batch, which takes
fewer operations.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from snapkv.errors import UnsupportedModelError, wrong
from snapkv.ops import gather_tokens


@dataclass(frozen=True)
class NumberFormat:
    """How a cache stores numbers: in the dtype of the model, or as bytes with one scale for each
    layer.
    """

    dtype: torch.dtype  # of the model
    byte_dtype: torch.dtype | None = None  # of the bytes, if numbers are stored in bytes
    name: str = "auto"  # the name of the format in vLLM's kernels

    @classmethod
    def from_layer(cls, layer: Any) -> Self:
        """Return the format in which an attention layer of vLLM stores keys and values. Its cache
        must be allocated.
        """
        name = getattr(layer, "kv_cache_dtype", "auto")
        if name not in FP8:
            return cls(layer.kv_cache.dtype)
        # Some AMD GPUs use another dtype.
        e4m3 = getattr(layer.impl, "fp8_dtype", torch.float8_e4m3fn)
        return cls(layer.dtype, torch.float8_e5m2 if name == "fp8_e5m2" else e4m3, name)

    def decode(self, stored: Tensor) -> Tensor:
        """Convert stored numbers to the dtype of the model, without multiplying by their scale. The
        conversion is exact. Numbers that are not stored as bytes are returned as they are.
        """
        return stored if self.byte_dtype is None else stored.view(self.byte_dtype).to(self.dtype)

    @property
    def bytes(self) -> int:
        """How many bytes a stored number takes, plus those of its decoded form if that is another
        tensor.
        """
        return self.dtype.itemsize + (0 if self.byte_dtype is None else self.byte_dtype.itemsize)


FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""vLLM's names of the formats that store a number in a byte with one scale for each layer."""


def make_layout(layers: Sequence[Any]) -> "Layout":
    """Return the layout of some attention layers that are alike, by which their caches are read and
    written.

    Args:
        layers: vLLM's attention layers, at least one. That they are alike is not checked: the first
            one decides. vLLM must have allocated their caches, and their backend must be one of
            `LAYOUTS`.
    """
    return LAYOUTS[layers[0].get_attn_backend().get_name()](layers)


def slot_numbers(blocks: Tensor, tokens: int, block_tokens: int) -> Tensor:
    """Return the numbers of the slots in which the first tokens of a request are stored.

    Args:
        blocks: the numbers of the request's blocks in the order of their tokens, an integer tensor.
        tokens: how many slots are returned; if it is more than the blocks have, all slots are.
        block_tokens: the size of a block.
    """
    within = torch.arange(block_tokens, device=blocks.device)
    return (blocks[:, None] * block_tokens + within).flatten()[:tokens]


def pad_tokens(states: Tensor, tokens: int) -> Tensor:
    """Append zeros to the states of the kept tokens, so that they fill the last block. If they fill
    it already, `states` itself is returned.

    The last block may have belonged to a recurrent state, whose bytes may be NaN as keys and
    values. Attention masks the slots after a request's tokens by products with zero, which would
    stay NaN.

    Args:
        states: (..., K, D) keys or values.
        tokens: the number of tokens in the result, at least K.
    """
    missing = tokens - states.shape[-2]
    return functional.pad(states, (0, 0, 0, missing)) if missing else states


class PlainLayout:
    """The layout of FlashAttention and Triton, in which the keys and the values of a token lie next
    to each other in memory.

    It reads and writes the caches of some layers that are alike. Numbers are moved as they are
    stored.

    Args:
        caches: the cache of each layer, (blocks, Hkv, block_tokens, 2 * D) with any strides.
        head_size: D, the size of a key.
        form: how to decode the stored numbers; by default they are in the dtype of the model.
    """

    def __init__(
        self, caches: Sequence[Tensor], head_size: int, form: NumberFormat | None = None
    ) -> None:
        self._caches = caches
        self._head_size = head_size
        self.form = form or NumberFormat(caches[0].dtype)

    def select_layers(self, layers: slice) -> Self:
        """Return a layout that contains only some of the layers. It shares their caches."""
        return type(self)(self._caches[layers], self._head_size, self.form)

    def read_keys(self, blocks: Tensor, tokens: int) -> Tensor:
        """Copy the keys of the first tokens of a request out of the caches, in the form in which
        the caches store numbers.

        Args:
            blocks: (blocks,) the numbers of the request's blocks in the caches, in the order of the
                tokens.
            tokens: the number T of tokens that are read.

        Returns:
            A tensor of shape (layers, Hkv, T, D).
        """
        every = torch.arange(tokens, device=blocks.device).expand(len(self._caches), 1, tokens)
        return self._read(slice(None, self._head_size), blocks, every)

    def select_keys(self, keys: Tensor, keep: Tensor) -> Tensor:
        """Select the keys of the kept tokens from the keys that `read_keys` has returned.

        Args:
            keys: (layers, Hkv, T, D), the output of `read_keys`.
            keep: (layers, Hkv or 1, K) int64, the indices below T of the K tokens that are kept.

        Returns:
            A tensor of shape (layers, Hkv, K, D).
        """
        return gather_tokens(keys, keep)

    def read_values(self, blocks: Tensor, keep: Tensor) -> Tensor:
        """Copy the values of the kept tokens of a request out of the caches, in the form in which
        the caches store numbers.

        Args:
            blocks: (blocks,) the numbers of the request's blocks in the caches, in the order of the
                tokens.
            keep: (layers, Hkv or 1, K) int64, the indices of the K kept tokens among all tokens of
                the blocks.

        Returns:
            A tensor of shape (layers, Hkv, K, D).
        """
        return self._read(slice(self._head_size, None), blocks, keep)

    def _read(self, half: slice, blocks: Tensor, tokens: Tensor) -> Tensor:
        heads, block_tokens = self._caches[0].shape[1:3]
        head = torch.arange(heads, device=blocks.device)[:, None]
        places = zip(blocks[tokens // block_tokens], tokens % block_tokens, strict=True)
        layers = zip(self._caches, places, strict=True)
        return torch.stack([cache[..., half][block, head, slot] for cache, (block, slot) in layers])

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values into slots of the caches, which are changed in place.

        Args:
            slots: (K,) the numbers of the slots, which are the same for all layers and heads.
            keys: (layers, Hkv, K, D) keys, in the form in which the caches store numbers.
            values: (layers, Hkv, K, D) values in the same form.
        """
        block_tokens = self._caches[0].shape[2]
        block, token = slots // block_tokens, slots % block_tokens
        by_token = torch.cat([keys, values], dim=-1).transpose(1, 2)  # (layers, K, Hkv, 2 * D)
        for cache, states in zip(self._caches, by_token, strict=True):
            cache.transpose(1, 2)[block, token] = states


def _plain(layers: Sequence[Any]) -> PlainLayout:
    form = NumberFormat.from_layer(layers[0])
    caches = [layer.kv_cache for layer in layers]
    if form.byte_dtype is not None:
        caches = [cache.view(torch.uint8) for cache in caches]  # fp8 tensors cannot be gathered
    return PlainLayout(caches, layers[0].head_size, form)


def _latent(layers: Sequence[Any]) -> PlainLayout:
    """Return the layout of layers with latent attention (MLA), whose caches have the shape (blocks,
    block_tokens, size).

    The latent and the rotated part are read as the keys of one KV head. Values are computed from
    the same latent, so the stored values have size 0.
    """
    return PlainLayout([layer.kv_cache.unsqueeze(1) for layer in layers], layers[0].head_size)


_DIGIT = 8  # every float format, also fp8, represents the integers below it exactly


class CpuLayout:
    """The layout of the CPU backend, which packs each block in the order that the instruction set
    of the machine needs.

    The packing is defined only by vLLM's kernel. So for each kind of block, numbers that encode
    their own index are written with that kernel and then located in memory. Reads use the packing
    that was found in this way, writes use the kernel. The methods are those of `PlainLayout`; the
    first read raises UnsupportedModelError if the kernel changes numbers.

    Args:
        caches: the cache of each layer, (blocks, Hkv, block_tokens, 2 * D).
        isa: vLLM's name of the instruction set.
        form: how to decode the stored numbers; by default they are in the dtype of the model.
    """

    def __init__(
        self, caches: Sequence[Tensor], isa: str, form: NumberFormat | None = None
    ) -> None:
        self._caches = caches
        self._isa = isa
        self.form = form or NumberFormat(caches[0].dtype)
        _, self._heads, self._block_tokens, twice = caches[0].shape
        self._head_size = twice // 2

    def select_layers(self, layers: slice) -> Self:
        return type(self)(self._caches[layers], self._isa, self.form)

    def read_keys(self, blocks: Tensor, tokens: int) -> Tensor:
        """Copy the keys of the first tokens of a request, with the arguments and the result of
        `PlainLayout.read_keys`. In memory, the tokens of the result may be next to each other
        instead of the numbers of a token.
        """
        return self._read(0, blocks)[:, :, :tokens]

    def select_keys(self, keys: Tensor, keep: Tensor) -> Tensor:
        if keys.stride(-2) != 1:
            return gather_tokens(keys, keep)
        columns = keep.unsqueeze(2).expand(-1, self._heads, self._head_size, -1)
        return keys.mT.gather(3, columns).mT

    def read_values(self, blocks: Tensor, keep: Tensor) -> Tensor:
        places = self._measure_packings()[1].indices.view(self._block_tokens, self._head_size)
        head = torch.arange(self._heads)[:, None]
        halves = 2 * (blocks[keep // self._block_tokens] * self._heads + head) + 1
        halves = halves.expand(len(self._caches), -1, -1)
        rows = (keep % self._block_tokens).expand_as(halves)
        found = (  # indices are larger than the numbers, so they are built for one layer at a time
            cache.view(-1)[places[row] + half[..., None] * places.numel()]
            for cache, row, half in zip(self._caches, rows, halves, strict=True)
        )
        return torch.stack(list(found))

    def _measure_packings(self) -> "tuple[_Packing, _Packing]":
        return _measure_packings(self._isa, self._block_tokens, self._head_size, self.form)

    def _halves(self, cache: Tensor) -> Sequence[Tensor]:
        """Return the part of a layer's cache that contains the keys, and the part that contains the
        values.

        Returns:
            Two views of shape (blocks, Hkv, block_tokens, D).
        """
        by_half = cache.view(*cache.shape[:2], 2 * self._block_tokens, self._head_size)
        return by_half.chunk(2, dim=2)

    def _read(self, half: int, blocks: Tensor) -> Tensor:
        """Read all keys or all values of some blocks in every layer.

        Args:
            half: 0 for the keys, 1 for the values.
            blocks: the numbers of the blocks.

        Returns:
            A new tensor of shape (layers, Hkv, T, D), where T are all tokens of the blocks.
        """
        packing = self._measure_packings()[half]
        return packing.read([self._halves(cache)[half] for cache in self._caches], blocks)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        for cache, *states in zip(self._caches, keys, values, strict=True):
            of_keys, of_values = (_by_token(self.form.decode(one)) for one in states)
            _write_by_kernel(of_keys, of_values, self._halves(cache), slots, self._isa, self.form)


def _write_by_kernel(
    keys: Tensor,
    values: Tensor,
    halves: Sequence[Tensor],
    slots: Tensor,
    isa: str,
    form: NumberFormat,
) -> None:
    """Write keys and values into slots of a cache with vLLM's own kernel, which packs them.

    Args:
        keys: (K, Hkv, D) keys, not scaled.
        values: (K, Hkv, D) values, not scaled.
        halves: the views of the keys and of the values of the cache, which are changed in place.
        slots: the slot of each token.
        isa: the instruction set for which the kernel packs.
        form: the format of the cache.
    """
    from vllm import _custom_ops as ops

    ops.cpu_attn_reshape_and_cache(
        keys, values, *halves, slots, isa, kv_cache_dtype=form.name
    )  # with a scale of one, so that every number becomes the same byte again


def _cpu(layers: Sequence[Any]) -> CpuLayout:
    form = NumberFormat.from_layer(layers[0])
    return CpuLayout([layer.kv_cache for layer in layers], layers[0].isa, form)


Layout = PlainLayout | CpuLayout

LAYOUTS: dict[str, Callable[[Sequence[Any]], Layout]] = {
    "CPU_ATTN": _cpu,
    "FLASH_ATTN": _plain,
    "TRITON_ATTN": _plain,
    "CPU_MLA": _latent,
    "TRITON_MLA": _latent,
    "FLASH_ATTN_MLA": _latent,
    "FLASHMLA": _latent,
}
"""The layout of each supported attention backend of vLLM, by the backend's name."""


def _by_token(states: Tensor) -> Tensor:
    """Change the order of the axes so that the axis of tokens comes before the axis of heads.

    Args:
        states: (Hkv, K, D) keys or values.

    Returns:
        A contiguous tensor of shape (K, Hkv, D).
    """
    heads, kept, head_size = states.shape
    if states.mT.is_contiguous():  # one matrix, which is transposed faster than several
        return states.mT.reshape(-1, kept).t().contiguous().view(kept, heads, head_size)
    return states.transpose(0, 1).contiguous()


_Axes = tuple[tuple[int, int], ...]
"""The length and the stride of each axis, the largest stride first."""


@dataclass(frozen=True)
class _Packing:
    """The place of each number of a block in memory, token by token."""

    indices: Tensor  # (block_tokens * D,) int64
    # The axes of the tokens and of the numbers of a token in memory; None if the indices are not
    # those of a strided tensor. A strided copy is several times faster than a look-up of indices.
    tokens: _Axes | None = None
    numbers: _Axes | None = None

    @classmethod
    def build(cls, indices: Tensor, block_tokens: int, head_size: int) -> Self:
        """Build the packing from its indices, and find out whether they are the indices of a
        strided tensor. Only then `tokens` and `numbers` are set.

        Args:
            indices: (block_tokens * D,) int64, where each number of a block lies in memory.
            block_tokens: the size of a block.
            head_size: D, the size of a key or value.
        """
        of_tokens = _factors(block_tokens)
        sizes = (*of_tokens, *_factors(head_size))
        strides, described, step = [], indices[:1], indices.numel()
        for size in sizes:
            step //= size
            strides.append(int(indices[step] - indices[0]))
            described = (described[:, None] + torch.arange(size) * strides[-1]).flatten()
        if int(indices[0]) or not torch.equal(described, indices):
            return cls(indices)
        axes = tuple(zip(sizes, strides, strict=True))
        return cls(indices, axes[: len(of_tokens)], axes[len(of_tokens) :])

    def read(self, caches: Sequence[Tensor], blocks: Tensor) -> Tensor:
        """Read the tokens of some blocks from the cache of each layer.

        Args:
            caches: a (blocks, Hkv, block_tokens, D) cache for each layer.
            blocks: the numbers of the blocks.

        Returns:
            A new tensor of shape (layers, Hkv, T, D), where T are all tokens of the blocks. If
            neighbouring tokens of a block are neighbours in memory, they are in the result as well,
            because this is copied faster.
        """
        heads, head_size = caches[0].shape[1], caches[0].shape[3]
        if self.tokens is None or self.numbers is None:
            rows = [cache[blocks].flatten(2)[..., self.indices] for cache in caches]
            return torch.stack(rows).transpose(1, 2).reshape(len(caches), heads, -1, head_size)
        side_by_side = self.tokens[-1][1] == 1
        axes = self.numbers + self.tokens if side_by_side else self.tokens + self.numbers
        sizes, strides = zip(*axes, strict=True)
        # The number of axes between heads and blocks.
        before = len(self.numbers) if side_by_side else 0
        shape = len(caches), heads, *sizes[:before], len(blocks), *sizes[before:]
        states = caches[0].new_empty(shape)
        for cache, found in zip(caches, states, strict=True):
            of_cache = (*cache.shape[:2], *sizes), (*cache.stride()[:2], *strides)
            strided = cache.as_strided(*of_cache)
            torch.index_select(strided, 0, blocks, out=found.movedim(1 + before, 0))
        if side_by_side:
            return states.reshape(len(caches), heads, head_size, -1).mT
        return states.reshape(len(caches), heads, -1, head_size)


def _factors(number: int) -> list[int]:
    """Return the prime factors of a positive number in descending order, each as often as it
    divides the number; empty for 1.
    """
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found[::-1]


@functools.cache
def _measure_packings(
    isa: str, block_tokens: int, head_size: int, form: NumberFormat
) -> tuple[_Packing, _Packing]:
    """Find out how vLLM's kernel packs the keys and the values of a block, by writing known numbers
    with it. The result is cached.

    Args:
        isa: vLLM's name of the instruction set for which the kernel packs.
        block_tokens: the size of a block.
        head_size: D, the size of a key or value.
        form: the format of the cache.

    Returns:
        The packing of the keys, and that of the values.

    Raises:
        UnsupportedModelError: the kernel does more than move the numbers.
    """
    numbers = torch.arange(block_tokens * head_size)
    found = [torch.zeros_like(numbers), torch.zeros_like(numbers)]
    power = 1
    while power < numbers.numel():
        digits = (numbers // power % _DIGIT).to(form.dtype).view(block_tokens, 1, head_size)
        for half, packed in zip(found, _pack(digits, isa, form), strict=True):
            half += packed.flatten().long() * power
        power *= _DIGIT
    for half in found:
        if not torch.equal(half.sort().values, numbers):
            problem = f"the CPU backend does not store numbers unchanged in a block ({isa}, {form})"
            remedy = "Use float32 to serve the model"
            raise wrong("snapkv", problem, remedy, UnsupportedModelError)
    keys, values = (_Packing.build(half.argsort(), block_tokens, head_size) for half in found)
    return keys, values


def _pack(states: Tensor, isa: str, form: NumberFormat) -> tuple[Tensor, Tensor]:
    """Write a block with vLLM's kernel into a new cache, and return the keys and the values in the
    order in which they lie in memory.

    Args:
        states: (block_tokens, 1, D), written both as keys and as values.
        isa: the instruction set for which the kernel packs.
        form: the format of the cache.
    """
    block_tokens, _, head_size = states.shape
    stored = torch.uint8 if form.byte_dtype else form.dtype
    cache = torch.zeros(1, 1, 2 * block_tokens, head_size, dtype=stored)
    keys, values = cache.chunk(2, dim=2)
    slots = torch.arange(block_tokens)
    _write_by_kernel(states, states.clone(), (keys, values), slots, isa, form)
    return form.decode(keys), form.decode(values)
