"""Quantized keys and values: blocks of tokens of one head each, and their decoding.

Integers are asymmetric, with a scale and a least number for every group, as in KIVI (Liu et al.,
ICML 2024): keys in groups along the tokens, where a channel's numbers are similar, values in groups
along the channels. A block has as many tokens as a group, so every group lies in one block and a
head grows by whole blocks.

A decoded number is within half a step of its group, plus what float32 and the dtype of the states
round; within a whole step if the nearest one is beyond that dtype. A step is the group's range,
widened by at most the spacing of float16 at its least number, over the number of levels, and a
1000th of that or 2**-24 more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from snapkv.errors import wrong
from snapkv.ops.choice import implementation, triton_obstacle

Along = Literal["tokens", "channels"]

_SMALLEST_STEP = 2.0**-24
"""The smallest positive float16."""


@dataclass(frozen=True, kw_only=True)
class Codes:
    """Keys or values that have been quantized in blocks of the same number of tokens.

    They stand for (M, G, D) states: M blocks of G tokens. Keys, whose groups lie along the tokens,
    are stored channel by channel; values, with groups of channels, group by group. So products find
    all numbers that share a scale side by side.

    Attributes:
        packed: (M, rows, G) uint8 along tokens, a row for every channel; (M, groups, rows, width)
            along channels, a row for every token. With two codes a byte there are half as many
            rows: row j of n holds those of j and j + n, the first in the lower bits. Channels are
            padded to whole bytes along tokens, to whole groups along channels.
        scale: the size of a step, (M, D) along tokens, (M, groups, G) along channels; float16, or
            float32 if the states leave its range.
        least: the number that zero stands for, in the shape of `scale`.
        bits: 4 or 8.
        along: the axis of the groups.
        channels: D.
        dtype: the name of the states' dtype.
    """

    packed: Tensor
    scale: Tensor
    least: Tensor
    bits: int
    along: Along
    channels: int
    dtype: str

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.packed)

    @property
    def nbytes(self) -> int:
        """The number of bytes that the integers and their scales take."""
        return int(self.packed.nbytes + self.scale.nbytes + self.least.nbytes)

    def blocks(self, chosen: Tensor | slice) -> "Codes":
        """Return the codes of the chosen blocks only, in the order of `chosen`."""
        parts = self.packed[chosen], self.scale[chosen], self.least[chosen]
        return replace(self, packed=parts[0], scale=parts[1], least=parts[2])

    def split(self, sizes: list[int]) -> "list[Codes]":
        """Split the blocks into several parts, which share their memory.

        Args:
            sizes: how many blocks each part has.
        """
        tensors = (torch.split(part, sizes) for part in (self.packed, self.scale, self.least))
        parts = zip(*tensors, strict=True)
        return [replace(self, packed=one, scale=two, least=three) for one, two, three in parts]

    def joined(self, other: "Codes") -> "Codes":
        """Return these blocks and those of `other` together.

        Both must have the same bits, groups and channels.
        """
        wide = torch.promote_types(self.scale.dtype, other.scale.dtype)
        return replace(
            self,
            packed=torch.cat([self.packed, other.packed]),
            scale=torch.cat([self.scale.to(wide), other.scale.to(wide)]),
            least=torch.cat([self.least.to(wide), other.least.to(wide)]),
        )

    def integers(self) -> Tensor:
        """Unpack the integers of all blocks.

        Returns:
            Float32 in the layout of `packed`, with all rows.
        """
        packed = self.packed
        if self.bits == 8:
            return packed.float()
        *blocks, rows, width = packed.shape
        numbers = packed.new_empty(*blocks, 2, rows, width)
        low, high = numbers.unbind(dim=-3)
        torch.bitwise_and(packed, 15, out=low)
        torch.bitwise_right_shift(packed, 4, out=high)
        return numbers.flatten(-3, -2).float()

    def decoded(self) -> Tensor:
        """Return the keys or values that the integers stand for.

        Returns:
            (M, G, D) in the dtype of the states.
        """
        numbers, dtype = self.integers(), getattr(torch, self.dtype)
        if self.along == "tokens":
            numbers = numbers[:, : self.channels].mul_(self.scale[..., None])
            return numbers.add_(self.least[..., None]).mT.to(dtype)
        states = numbers.mul_(self.scale[..., None]).add_(self.least[..., None])
        return states.transpose(1, 2).flatten(2)[..., : self.channels].to(dtype)


def encode_all(parts: Sequence[tuple[Tensor, int, Along]]) -> list[Codes]:
    """Quantize several tensors together; this waits for a GPU only once.

    Args:
        parts: for each tensor its (M, G, D) blocks, the number of bits, and whether the groups of G
            numbers lie along tokens or channels.

    Returns:
        The codes of each tensor.

    Raises:
        InvalidArgumentError: a number is not finite, or beyond half of float32's range.
    """
    encode_them = implementation(
        "encode_all",
        "auto",
        parts[0][0],
        {"reference": encode_in_torch},
        fitting="reference",
        kernels="snapkv.ops.codes.triton_coding",
        obstacle=lambda: next(filter(None, (_obstacle(*part) for part in parts)), None),
    )
    return encode_them(parts)


def encode_in_torch(parts: Sequence[tuple[Tensor, int, Along]]) -> list[Codes]:
    """Quantize several tensors with the operations of torch; see `encode_all`.

    Raises:
        InvalidArgumentError: a number is not finite, or beyond half of float32's range.
    """
    grouped = [_grouped(*part) for part in parts]
    lows, highs = zip(*[torch.aminmax(groups, dim=-1) for groups in grouped], strict=True)
    ends = torch.cat([each.flatten() for each in (*lows, *highs)])
    (lowest, highest), largest = ends.chunk(2), largest_of(ends)
    narrow = torch.float16 if largest <= torch.finfo(torch.float16).max else torch.float32
    if len(parts) > 1 and narrow is torch.float32:
        return [encode_in_torch([part])[0] for part in parts]
    _require_range(largest, parts[0][1])
    least = _rounded(lowest, narrow, -1)
    shift = least.float()
    step = ((highest - shift) / _steps(lows, parts)).clamp(min=_SMALLEST_STEP)
    scale = _rounded(step, narrow, 1)
    sizes = [low.numel() for low in lows]
    shared = [torch.split(each, sizes) for each in (least, scale, shift, scale.float())]
    made = []
    for (states, bits, along), groups, low, *own in zip(parts, grouped, lows, *shared, strict=True):
        D, (least, scale, shift, step) = states.shape[2], [each.view_as(low) for each in own]
        steps = groups.sub(shift[..., None]).div_(step[..., None]).round_()
        if largest > torch.finfo(states.dtype).max / 2:  # decoded numbers may leave the dtype
            room = (torch.finfo(states.dtype).max - shift) / step
            steps = steps.minimum(room.floor().clamp(max=2**bits - 1)[..., None])
        channels = slice(D) if along == "tokens" else slice(None)
        made.append(
            Codes(
                packed=_packed(steps.to(torch.uint8), bits),
                scale=scale[:, channels].contiguous(),
                least=least[:, channels].contiguous(),
                bits=bits,
                along=along,
                channels=D,
                dtype=_name(states.dtype),
            )
        )
    return made


def _steps(lows: Sequence[Tensor], parts: Sequence[tuple[Tensor, int, Along]]) -> Any:
    """Return the number of steps in each group.

    Returns:
        One number, or a tensor with one per group if the parts differ in bits.
    """
    steps = [2**bits - 1 for _, bits, _ in parts]
    if len(set(steps)) == 1:
        return steps[0]
    return torch.cat([low.new_full((low.numel(),), n) for low, n in zip(lows, steps, strict=True)])


def _grouped(states: Tensor, bits: int, along: Along) -> Tensor:
    """Convert the states to float32, with each group along the last axis.

    Args:
        states: (M, G, D).
        bits: 4 or 8; channels are padded to whole bytes.
        along: the axis of the groups.

    Returns:
        (M, channels, G) along tokens; (M, groups, G, group size) along channels.
    """
    M, G, D = states.shape
    if along == "tokens":
        return _padded(states.float(), -D % (8 // bits)).mT
    width = min(G, D)
    padded = _padded(states.float(), -D % width)
    return padded.view(M, G, padded.shape[-1] // width, width).transpose(1, 2)


def _packed(numbers: Tensor, bits: int) -> Tensor:
    """Pack two 4-bit integers into each byte; see `Codes.packed`. 8-bit integers are unchanged."""
    if bits == 4:
        low, high = numbers.chunk(2, dim=-2)
        numbers = low | high << 4
    return numbers.contiguous()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _obstacle(states: Tensor, bits: int, along: Along) -> str | None:
    """Return the reason why the kernel cannot be used for these states, or None if it can."""
    _, G, D = states.shape
    whole = D % (8 // bits) == 0 if along == "tokens" else D % min(G, D) == G % (8 // bits) == 0
    if not whole or G & (G - 1):
        return f"with groups of {G} tokens and heads of {D} channels, which are not whole bytes"
    return triton_obstacle(states)


def largest_of(numbers: Tensor) -> float:
    """Return the largest absolute value, or NaN if there is one; this waits for a GPU."""
    return float(torch.linalg.vector_norm(numbers, math.inf)) if len(numbers) else 0.0


def _require_range(largest: float, bits: int) -> None:
    """Check that the numbers are small enough to be quantized.

    Args:
        largest: the largest absolute number.
        bits: for the message.

    Raises:
        InvalidArgumentError: it is not finite, or beyond half of float32's range.
    """
    most = torch.finfo(torch.float32).max / 2
    if not largest <= most:  # also true for NaN
        problem = f"the largest value for {bits} bits is {most:.1e}, but got {largest}"
        raise wrong("quantize", problem, "Remove the argument quantize")


def _padded(states: Tensor, missing: int) -> Tensor:
    """Repeat the last channel until the number of channels is large enough.

    Args:
        states: (M, G, D).
        missing: how many channels to add.

    Returns:
        (M, G, D + missing).
    """
    return F.pad(states, (0, missing), mode="replicate") if missing else states


def _rounded(numbers: Tensor, dtype: torch.dtype, way: int) -> Tensor:
    """Round numbers to the next number that a dtype can represent.

    Args:
        numbers: float32, of any shape.
        dtype: the dtype of the result.
        way: 1 to round up, -1 to round down.

    Returns:
        A tensor of `dtype` in the shape of `numbers`.
    """
    nearest, ends = numbers.to(dtype), torch.finfo(dtype)
    fits = nearest >= numbers if way > 0 else nearest <= numbers
    spacing = numbers.abs() + ends.smallest_normal
    return nearest.where(fits, torch.add(numbers, spacing, alpha=way * ends.eps / 2).to(dtype))
