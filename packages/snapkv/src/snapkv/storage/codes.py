"""Keys and values in few bits.

Integers are asymmetric, in groups of up to 32 numbers with a scale and a least value each, as in
KIVI (Liu et al., ICML 2024): keys along the tokens, where a channel's numbers are alike, values
along the channels. fp8 is e4m3 with a scale per token. transformers' quantised layers are not used:
their codes have no bytes to report, no rows to reorder and no form on disk.

A number comes back within half a step of its group, `Codes.scale`, plus what float32 and the dtype
of the states round; within a whole step where the nearest one is beyond that dtype. A step is the
group's range, widened by at most the spacing of float16 at its least value, over the number of
levels, and a 1000th of that or 2**-24 more. In fp8 it comes back within a sixteenth of itself, or
a 1024th of the scale where that is more.
"""

import functools
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from snapkv.errors import InvalidArgumentError

Bits = Literal["int8", "int4", "fp8"]

QUANTIZED = "quantized"
"""Kind of a store in few bits, as files of 0.1.0 have it."""

GROUP = 32
_LARGEST_FP8 = 448.0
_LEVELS = {"int8": 255, "int4": 15}
_SMALLEST_STEP = 2.0**-24
"""Of float16."""


@dataclass(frozen=True, kw_only=True)
class Codes:
    """Quantised (B, H, N, D) states.

    Attributes:
        codes: uint8 or float8, (B, H, N, D), or (B, H, N, D / 2) with two numbers a byte; N and D
            are padded to whole groups along the grouped axis.
        scale: float32 for fp8, else as `least`; what a step is worth.
        least: what zero stands for: float16, float32 where the states leave its range; None for
            fp8.
        bits: "int8", "int4" or "fp8".
        along: axis of the groups, -2 for tokens or -1 for channels.
        shape: of the states.
        dtype: of the states, by name.
    """

    codes: Tensor
    scale: Tensor
    least: Tensor | None
    bits: Bits
    along: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Codes, scales and least values, by the names of their fields."""
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: part for name, part in parts.items() if isinstance(part, Tensor)}

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and least values."""
        return sum(part.nbytes for part in self.tensors.values())

    def select_rows(self, rows: Tensor) -> "Codes":
        """The rows in another order."""
        parts: dict[str, Any] = {
            name: part.index_select(0, rows.to(part.device)) for name, part in self.tensors.items()
        }
        return replace(self, **parts, shape=(len(rows), *self.shape[1:]))

    def states(self) -> Tensor:
        """What they stand for, (B, H, N, D) in the dtype of the original.

        Computed in place: no scale, whatever its shape, can make them more than the codes.
        """
        dtype = getattr(torch, self.dtype)
        if self.least is None:
            fp8 = self.codes.view(torch.float8_e4m3fn).float()
            return fp8.mul_(self.scale).to(dtype)
        codes = self.codes
        if self.bits == "int4":
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
        grouped = _grouped(codes, self.along, self.shape[self.along]).float()
        whole = grouped.mul_(self.scale.float()).add_(self.least.float())
        N, D = self.shape[-2:]
        return _ungrouped(whole, self.along)[..., :N, :D].to(dtype)


def quantise(states: Tensor, bits: Bits, *, along: int) -> Codes:
    """(B, H, N, D) states in few bits, within the bounds of this module.

    Args:
        states: any floating dtype.
        bits: "int8", "int4" or "fp8".
        along: axis of the groups of integers, -2 or -1.

    Raises:
        InvalidArgumentError: a number that is not finite, or beyond half of float32's range.
    """
    dtype = str(states.dtype).removeprefix("torch.")
    coded = functools.partial(Codes, bits=bits, along=along, shape=tuple(states.shape), dtype=dtype)
    largest = _largest(states, bits)
    if bits == "fp8":
        scale = states.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / _LARGEST_FP8
        codes = (states.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8)
        return coded(codes=codes, scale=scale, least=None)
    size = states.shape[along]
    grouped = _grouped(_whole_groups(states.float(), along), along, size)
    axis = -1 if along == -1 else -2
    lowest, highest = grouped.amin(dim=axis, keepdim=True), grouped.amax(dim=axis, keepdim=True)
    narrow = torch.float16 if largest <= torch.finfo(torch.float16).max else torch.float32
    least = _rounded_down(lowest, narrow)
    step = ((highest - least.float()) / _LEVELS[bits]).clamp(min=_SMALLEST_STEP)
    scale = -_rounded_down(-step, narrow)
    steps = (grouped - least.float()) / scale.float()
    room = (torch.finfo(states.dtype).max - least.float()) / scale.float()
    codes = steps.round().minimum(room.floor().clamp(max=_LEVELS[bits])).to(torch.uint8)
    codes = _ungrouped(codes, along)
    if bits == "int4":
        codes = codes[..., ::2] | (codes[..., 1::2] << 4)
    return coded(codes=codes, scale=scale, least=least)


def _largest(states: Tensor, bits: Bits) -> float:
    """The largest absolute number; a GPU is waited for."""
    largest, most = float(states.abs().amax()), torch.finfo(torch.float32).max / 2
    if not largest <= most:  # nor is nan
        raise InvalidArgumentError(
            f"bits: expected keys and values of at most {most:.1e} to hold in {bits}, got "
            f"{largest}; hold them in the model's own dtype"
        )
    return largest


def _rounded_down(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest numbers of a dtype that are no higher than these float32 ones."""
    nearest, ends = numbers.to(dtype), torch.finfo(dtype)
    half_spacing = (numbers.abs() + ends.smallest_normal) * (ends.eps / 2)
    return nearest.where(nearest <= numbers, (numbers - half_spacing).to(dtype))


def _whole_groups(states: Tensor, along: int) -> Tensor:
    """The last number again and again, up to a whole group."""
    missing = -states.shape[along] % min(GROUP, states.shape[along])
    padding = (0, missing, 0, 0) if along == -1 else (0, 0, 0, missing)
    return F.pad(states, padding, mode="replicate") if missing else states


def _grouped(states: Tensor, along: int, size: int) -> Tensor:
    """(B, H, N, D) as (B, H, N, groups, 32) or (B, H, groups, 32, D); smaller than 32 is one."""
    return torch.unflatten(states, along, (-1, min(GROUP, size)))


def _ungrouped(grouped: Tensor, along: int) -> Tensor:
    return grouped.flatten(-2) if along == -1 else grouped.flatten(-3, -2)


def spread(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a dense store for one in few bits, as files of 0.1.0 have it."""
    keys, values = (
        torch.cat([codes.states(), state[name]], dim=-2)
        for codes, name in zip(state["codes"], ("keys", "values"), strict=True)
    )
    return {"keys": keys, "values": values, "num_kv_heads": state["num_kv_heads"]}
