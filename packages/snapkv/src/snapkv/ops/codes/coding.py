"""Few bits for flat keys and values: blocks of tokens of one head each, and what they stand for.

Integers are asymmetric, with a scale and a least number for every group, as in KIVI (Liu et al.,
ICML 2024): keys in groups along the tokens, where a channel's numbers are alike, values in groups
along the channels. A block has as many tokens as a group, so every group lies in one block and a
head grows by whole blocks.

A number comes back within half a step of its group, plus what float32 and the dtype of the states
round; within a whole step where the nearest one is beyond that dtype. A step is the group's range,
widened by at most the spacing of float16 at its least number, over the number of levels, and a
1000th of that or 2**-24 more.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from snapkv.errors import InvalidArgumentError

Along = Literal["tokens", "channels"]

_LARGEST_FLOAT8 = 448.0
_SMALLEST_STEP = 2.0**-24
"""Of float16."""


@dataclass(frozen=True, kw_only=True)
class Codes:
    """What stands for (M, G, D) states: M blocks of G tokens.

    Attributes:
        packed: (M, G, bytes) uint8; byte j holds the channels j, j + bytes, and so on, the first
            in the lowest bits. Channels are padded to whole groups where those lie along them.
        scale: what a step is worth, (M, 1, D) along tokens, (M, G, groups) along channels; float16,
            or float32 where the states leave its range.
        least: what zero stands for, as `scale`.
        bits: 2, 4 or 8.
        along: the axis of the groups.
        channels: D.
        dtype: of the states, by name.
        is_float: whether a code is a float8 (e4m3), with one scale a token and nothing added.
    """

    packed: Tensor
    scale: Tensor
    least: Tensor
    bits: int
    along: Along
    channels: int
    dtype: str
    is_float: bool = False

    def __len__(self) -> int:
        """M."""
        return len(self.packed)

    @property
    def nbytes(self) -> int:
        """Of codes, scales and least numbers."""
        return int(self.packed.nbytes + self.scale.nbytes + self.least.nbytes)

    def blocks(self, chosen: Tensor | slice) -> "Codes":
        """Some of the blocks."""
        parts = self.packed[chosen], self.scale[chosen], self.least[chosen]
        return replace(self, packed=parts[0], scale=parts[1], least=parts[2])

    def arranged(self, places: Tensor) -> "Codes":
        """Every block with its tokens in that order, (M, G) int64; they stand for the same."""

        def of_tokens(part: Tensor) -> Tensor:
            return part.gather(1, places[..., None].expand(-1, -1, part.shape[-1]))

        if self.along == "tokens":
            return replace(self, packed=of_tokens(self.packed))
        scale, least = of_tokens(self.scale), of_tokens(self.least)
        return replace(self, packed=of_tokens(self.packed), scale=scale, least=least)

    def joined(self, other: "Codes") -> "Codes":
        """These blocks and those of another, which is alike in all else."""
        wide = torch.promote_types(self.scale.dtype, other.scale.dtype)
        return replace(
            self,
            packed=torch.cat([self.packed, other.packed]),
            scale=torch.cat([self.scale.to(wide), other.scale.to(wide)]),
            least=torch.cat([self.least.to(wide), other.least.to(wide)]),
        )

    def integers(self) -> Tensor:
        """(M, G, D) float32: the integers alone; more channels where they fill groups or bytes."""
        mask, width = 2**self.bits - 1, self.packed.shape[-1]
        if self.is_float:
            return self.packed.view(torch.float8_e4m3fn).float()
        if self.bits == 8:
            return self.packed.float()
        numbers = self.packed.new_empty(*self.packed.shape[:2], width * 8 // self.bits).float()
        for place, part in enumerate(torch.split(numbers, width, dim=-1)):
            part.copy_((self.packed >> self.bits * place) & mask)
        return numbers

    def decoded(self) -> Tensor:
        """(M, G, D) what the codes stand for, in the dtype of the states."""
        numbers = self.integers()
        if self.along == "tokens":
            states = numbers[..., : self.channels].mul_(self.scale).add_(self.least)
        else:
            groups = self.scale.shape[-1]
            grouped = torch.unflatten(numbers, -1, (groups, numbers.shape[-1] // groups))
            states = grouped.mul_(self.scale[..., None]).add_(self.least[..., None]).flatten(-2)
        return states[..., : self.channels].to(getattr(torch, self.dtype))


def encode(states: Tensor, bits: int, *, along: Along) -> Codes:
    """(M, G, D) blocks of states in few bits, in groups of G tokens, or of G channels.

    Raises:
        InvalidArgumentError: a number that is not finite, or beyond half of float32's range.
    """
    M, G, D = states.shape
    largest = _largest(states, bits)
    per_byte = 8 // bits
    whole = G if along == "channels" and G < D else per_byte  # fewer than G are one group
    padded, axis = _padded(states.float(), -D % whole), 1
    grouped = padded
    if along == "channels":
        width = min(G, padded.shape[-1])
        grouped, axis = padded.view(M, G, padded.shape[-1] // width, width), -1
    lowest, highest = grouped.amin(dim=axis, keepdim=True), grouped.amax(dim=axis, keepdim=True)
    narrow = torch.float16 if largest <= torch.finfo(torch.float16).max else torch.float32
    least = _rounded_down(lowest, narrow)
    levels = 2**bits - 1
    step = ((highest - least.float()) / levels).clamp(min=_SMALLEST_STEP)
    scale = -_rounded_down(-step, narrow)
    room = (torch.finfo(states.dtype).max - least.float()) / scale.float()
    steps = ((grouped - least.float()) / scale.float()).round()
    numbers = steps.minimum(room.floor().clamp(max=levels)).to(torch.uint8).flatten(2)
    packed, *others = numbers.chunk(per_byte, dim=-1)
    for place, other in enumerate(others, start=1):
        packed = packed | other << bits * place
    if along == "tokens":
        scale, least = scale[..., :D], least[..., :D]
    else:
        scale, least = scale[..., 0], least[..., 0]
    return Codes(
        packed=packed.contiguous(),
        scale=scale.contiguous(),
        least=least.contiguous(),
        bits=bits,
        along=along,
        channels=D,
        dtype=_name(states.dtype),
    )


def encode_float(states: Tensor) -> Codes:
    """(M, G, D) blocks of states as float8, with a scale for every token; errors as `encode`.

    A number comes back within a sixteenth of itself, or a 1024th of the scale where that is more.
    """
    _largest(states, 8)
    wide = states.float()
    scale = wide.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / _LARGEST_FLOAT8
    return Codes(
        packed=(wide / scale).to(torch.float8_e4m3fn).view(torch.uint8),
        scale=scale,
        least=torch.zeros_like(scale),
        bits=8,
        along="channels",
        channels=states.shape[-1],
        dtype=_name(states.dtype),
        is_float=True,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _largest(states: Tensor, bits: int) -> float:
    """The largest absolute number; a GPU is waited for."""
    if not states.numel():
        return 0.0
    largest, most = float(states.abs().amax()), torch.finfo(torch.float32).max / 2
    if not largest <= most:  # nor is nan
        raise InvalidArgumentError(
            f"quantize: expected keys and values of at most {most:.1e} to hold in {bits} bits, got "
            f"{largest}; hold them in the model's own dtype"
        )
    return largest


def _padded(states: Tensor, missing: int) -> Tensor:
    """The last channel again and again."""
    return F.pad(states, (0, missing), mode="replicate") if missing else states


def _rounded_down(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest numbers of a dtype that are no higher than these float32 ones."""
    nearest, ends = numbers.to(dtype), torch.finfo(dtype)
    half_spacing = (numbers.abs() + ends.smallest_normal) * (ends.eps / 2)
    return nearest.where(nearest <= numbers, (numbers - half_spacing).to(dtype))
