"""Keys and values in few bits as files of 0.1.0 have them; they are only read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

QUANTIZED = "quantized"
"""Kind of a store in few bits."""

GROUP = 32
_PARTS = ("codes", "scale", "least")
"""The tensors of `Codes`; of a packed file, the rest is told in JSON."""


@dataclass(frozen=True, kw_only=True)
class Codes:
    """(B, H, N, D) states: integers in groups with a scale and a least value each, or fp8.

    Attributes:
        codes: uint8 or float8, (B, H, N, D), or (B, H, N, D / 2) with two numbers a byte; N and D
            are padded to whole groups along the grouped axis.
        scale: what a step is worth.
        least: what zero stands for; None for fp8.
        bits: "int8", "int4" or "fp8".
        along: axis of the groups, -2 for tokens or -1 for channels.
        shape: of the states.
        dtype: of the states, by name.
    """

    codes: Tensor
    scale: Tensor
    least: Tensor | None
    bits: Literal["int8", "int4", "fp8"]
    along: int
    shape: tuple[int, ...]
    dtype: str

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
        size = min(GROUP, self.shape[self.along])
        grouped = torch.unflatten(codes, self.along, (-1, size)).float()
        whole = grouped.mul_(self.scale.float()).add_(self.least.float())
        whole = whole.flatten(-2) if self.along == -1 else whole.flatten(-3, -2)
        N, D = self.shape[-2:]
        return whole[..., :N, :D].to(dtype)


def spread(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a dense store for one in few bits."""
    keys, values = (
        torch.cat([codes.states(), state[name]], dim=-2)
        for codes, name in zip(state["codes"], ("keys", "values"), strict=True)
    )
    return {"keys": keys, "values": values, "num_kv_heads": state["num_kv_heads"]}


def packed_bytes(notes: Mapping[str, Any]) -> int:
    """Bytes of the keys and values that `unpacked` will spread out, by the notes of a library."""
    dtypes = {told["dtype"]: getattr(torch, told["dtype"]) for told in notes.values()}
    return sum(math.prod(told["shape"]) * dtypes[told["dtype"]].itemsize for told in notes.values())


def unpacked(tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a library's file, those in few bits as near as they tell."""
    whole = dict(tensors)
    for name, told in notes.items():
        parts: dict[str, Any] = {part: whole.pop(f"{name}.{part}", None) for part in _PARTS}
        others = {key: value for key, value in told.items() if key != "axes"}
        states = Codes(**parts, **others | {"shape": tuple(told["shape"])}).states()
        whole[name] = states if told["axes"] == 4 else states[0, 0]
    return whole
