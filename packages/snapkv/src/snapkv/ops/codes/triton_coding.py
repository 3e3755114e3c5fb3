"""Quantize keys and values by one Triton kernel each, for CUDA; see `snapkv.ops.codes.coding`.

A program encodes one section of a block: all its channels for keys, one group of channels for
values. Numbers half way between two steps are rounded up, where torch rounds to even.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from snapkv.ops.codes.coding import Along, Codes, encode_in_torch, largest_of

_MOST = torch.finfo(torch.float16).max
_EPSILON = tl.constexpr(torch.finfo(torch.float16).eps / 2)
_LEAST_NORMAL = tl.constexpr(torch.finfo(torch.float16).smallest_normal)
_SMALLEST_STEP = tl.constexpr(2.0**-24)


def encode_all(parts: Sequence[tuple[Tensor, int, Along]]) -> list[Codes]:
    """Quantize several tensors on a GPU, as `snapkv.ops.encode_all` describes it.

    If a number is beyond the range of float16, torch does the work instead.

    Raises:
        InvalidArgumentError: a number is not finite, or beyond half of float32's range.
    """
    whole = [states for states, *_ in parts if len(states)]
    each = [torch.linalg.vector_norm(states, math.inf) for states in whole]
    if not largest_of(torch.stack(each) if each else torch.empty(0)) <= _MOST:
        return encode_in_torch(parts)
    return [encode(*part) for part in parts]


def encode(states: Tensor, bits: int, along: Along) -> Codes:
    """Quantize one tensor, whose numbers must all be in the range of float16.

    Args:
        states: (M, G, D).
        bits: 4 or 8.
        along: whether groups lie along tokens or channels.
    """
    states, (M, G, D) = states.contiguous(), states.shape
    width = G if along == "tokens" else min(G, D)
    sections, rows = (1, D) if along == "tokens" else (D // width, G)
    steps = (1, D) if along == "tokens" else (D, 1)
    shape = (M, rows) if along == "tokens" else (M, sections, rows)
    packed = states.new_empty(*shape[:-1], rows * bits // 8, width, dtype=torch.uint8)
    scale, least = states.new_empty(2, *shape, dtype=torch.float16)
    at_once = triton.next_power_of_2(rows * bits // 8)
    most = torch.finfo(states.dtype).max
    if M:
        with torch.cuda.device_of(states):
            _encode[(M * sections,)](
                states, packed, scale, least, sections, G * D, width, *steps, rows * bits // 8,
                most, LEVELS=2**bits - 1, PARTS=8 // bits, ROWS=at_once, WIDTH=width, num_warps=4,
            )  # fmt: skip
    return Codes(
        packed=packed,
        scale=scale,
        least=least,
        bits=bits,
        along=along,
        channels=D,
        dtype=str(states.dtype).removeprefix("torch."),
    )


@triton.jit
def _rounded(numbers, way: tl.constexpr):
    """Round numbers up to the next float16 number, or down if `way` is -1."""
    nearest = numbers.to(tl.float16)
    spacing = (tl.abs(numbers) + _LEAST_NORMAL) * _EPSILON
    beyond = (numbers + way * spacing).to(tl.float16)
    return tl.where(way * nearest.to(tl.float32) >= way * numbers, nearest, beyond)


@triton.jit(do_not_specialize=["sections", "rows"])
def _encode(
    states_at, packed_at, scale_at, least_at, sections, per_block, per_section, per_row, per_number,
    rows, most,
    LEVELS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Quantize one section of a block, with one group in each row.

    Of two rows that share bytes the first is in the lower bits.
    """
    section = tl.program_id(0).to(tl.int64)
    start = states_at + section // sections * per_block + section % sections * per_section
    row, across = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    there = row < rows
    packed = tl.zeros((ROWS, WIDTH), tl.uint8)
    for part in tl.static_range(PARTS):
        own = part * rows + row
        at = own[:, None] * per_row + across[None, :] * per_number
        numbers = tl.load(start + at, mask=there[:, None], other=0.0).to(tl.float32)
        least = _rounded(tl.min(numbers, axis=1), -1)
        shift = least.to(tl.float32)
        step = tl.math.div_rn(tl.max(numbers, axis=1) - shift, LEVELS + 0.0)
        scale = _rounded(tl.maximum(step, _SMALLEST_STEP), 1)
        step = scale.to(tl.float32)
        room = tl.minimum(tl.floor(tl.math.div_rn(most - shift, step)), LEVELS + 0.0)
        nearest = tl.floor(tl.math.div_rn(numbers - shift[:, None], step[:, None]) + 0.5)
        steps = tl.maximum(tl.minimum(nearest, room[:, None]), 0.0)
        packed = packed | (steps.to(tl.uint8) << (4 * part))
        slot = section * rows * PARTS + own
        tl.store(scale_at + slot, scale, mask=there)
        tl.store(least_at + slot, least, mask=there)
    place = (section * rows + row)[:, None] * WIDTH + across[None, :]
    tl.store(packed_at + place, packed, mask=there[:, None])
