"""Keys and values of a file in few bits: packed when it is written, spread out when it is read."""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from snapkv.storage.codes import Bits, Codes, quantise

_STATES = re.compile(r"layers\.\d+\.store\.(?:.+\.)?(keys|values)")
_PARTS = ("codes", "scale", "least")


def pack(tensors: Mapping[str, Tensor], bits: Bits) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file with the keys and values of stores in few bits.

    Args:
        tensors: as `encoding.encode_layer` names them; (B, H, N, D), or (N, D) of heads of
            different length. What is no states of tokens stays as it is.
        bits: "int8", "int4" or "fp8".

    Returns:
        The tensors to write, and JSON that `unpack` needs.
    """
    packed: dict[str, Tensor] = {}
    notes: dict[str, Any] = {}
    for name, tensor in tensors.items():
        found = _STATES.fullmatch(name)
        if found is None or not tensor.is_floating_point() or not tensor.numel():
            packed[name] = tensor
            continue
        states = tensor if tensor.ndim == 4 else tensor[None, None]
        codes = quantise(states, bits, along=-2 if found[1] == "keys" else -1)
        told = {field: getattr(codes, field) for field in ("bits", "along", "shape", "dtype")}
        notes[name] = told | {"axes": tensor.ndim}
        packed |= {
            f"{name}.{part}": value
            for part in _PARTS
            if (value := getattr(codes, part)) is not None
        }
    return packed, notes


def spread_bytes(notes: Mapping[str, Any]) -> int:
    """Bytes of the keys and values that `unpack` will spread out, by the notes of `pack`."""
    dtypes = {told["dtype"]: getattr(torch, told["dtype"]) for told in notes.values()}
    return sum(math.prod(told["shape"]) * dtypes[told["dtype"]].itemsize for told in notes.values())


def unpack(tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that `pack` was given, as near as their bits tell."""
    spread = dict(tensors)
    for name, told in notes.items():
        codes = Codes(
            codes=spread.pop(f"{name}.codes"),
            scale=spread.pop(f"{name}.scale"),
            least=spread.pop(f"{name}.least", None),
            bits=told["bits"],
            along=told["along"],
            shape=tuple(told["shape"]),
            dtype=told["dtype"],
        )
        states = codes.states()
        spread[name] = states if told["axes"] == 4 else states[0, 0]
    return spread
