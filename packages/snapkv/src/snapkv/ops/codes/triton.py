"""Attention to quantized heads as a Triton kernel, for CUDA: codes are decoded in registers.

It works like `snapkv.ops.ragged.triton`, whose second kernel combines the splits: a program takes
one head, a tile of its rows of queries and one split of what the head sees. A step of keys never
leaves a block, so its keys need only one scale for every channel.

Importing this module imports triton; `snapkv.ops` does so only if the kernel is to run.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from snapkv.ops.codes.coding import Codes
from snapkv.ops.codes.layout import BlockLayout
from snapkv.ops.ragged.inputs import TailInputs
from snapkv.ops.ragged.triton import _step, _weigh, in_splits, tiles


def coded_attention(inputs: TailInputs, keys: Codes, values: Codes, layout: BlockLayout) -> Tensor:
    """Compute attention to quantized heads on a GPU, without gradients.

    The arguments are those of `snapkv.ops.coded_attention`.

    Returns:
        (B, Hq, Q, Dv), in the dtype of the tail's values.
    """
    G, (begins, tokens) = layout.block_tokens, layout.table
    blocks = tiles(inputs, most=32)  # registers also hold codes and scales

    def attend(grid: tuple[int, int], *shared: Any, **compiled: Any) -> None:
        _attend_codes[grid](
            inputs.queries.contiguous(),
            *(keys.packed, keys.scale, keys.least),
            *(values.packed, values.scale, values.least),
            begins,
            tokens,
            *shared,
            G=G,
            KEY_BITS=keys.bits,
            KEY_ROWS=keys.packed.shape[1],
            VALUE_BITS=values.bits,
            VALUE_ROWS=values.packed.shape[2],
            GROUPS=values.packed.shape[1],
            WIDTH=values.packed.shape[3],
            num_stages=2 if max(keys.channels, values.channels) <= 128 else 1,
            **compiled,
        )

    sizes = begins * G, len(keys) * G, max(layout.head_blocks) * G
    return in_splits(attend, inputs, sizes, blocks)


@triton.jit
def _integers(packed_at, row, column, there, BITS: tl.constexpr, ROWS: tl.constexpr,
              WIDTH: tl.constexpr):  # fmt: skip
    """Load the integers at the given rows and columns, and convert them to float32.

    There are (ROWS, WIDTH) bytes. With two integers in a byte, rows from `ROWS` on are the upper
    bits. The result is 0 where `there` is False.
    """
    bytes_ = tl.load(packed_at + row % ROWS * WIDTH + column, mask=there, other=0)
    return ((bytes_ >> (row // ROWS * BITS).to(tl.uint8)) & (2**BITS - 1)).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "Q", "S", "split", "splits", "apart"])
def _attend_codes(
    queries_at, key_codes_at, key_scale_at, key_least_at, value_codes_at, value_scale_at,
    value_least_at, begins_at, tokens_at, tail_keys_at, tail_values_at, sums_at, marks_at,
    count_at, rows, Q, S, split, splits, apart, scaling, softcap,
    CAPPED: tl.constexpr, COUNTED: tl.constexpr,
    D: tl.constexpr, D_BLOCK: tl.constexpr, DV: tl.constexpr, DV_BLOCK: tl.constexpr,
    TILE: tl.constexpr, KEYS: tl.constexpr, G: tl.constexpr,
    KEY_BITS: tl.constexpr, KEY_ROWS: tl.constexpr,
    VALUE_BITS: tl.constexpr, VALUE_ROWS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute the attention of a tile of queries to one split of the quantized keys.

    Stores the weighted sums, the maximum and the total.
    """
    if COUNTED:
        S = tl.load(count_at).to(tl.int32)
    per_head = tl.cdiv(rows, TILE)
    head = (tl.program_id(0) // per_head).to(tl.int64)
    part = tl.program_id(1)
    first_block = tl.load(begins_at + head)
    kept = ((tl.load(begins_at + head + 1) - first_block) * G).to(tl.int32)
    begin = part * split
    end = tl.minimum(begin + split, kept + S)
    if begin >= end:
        return  # this head is shorter than the longest, and nothing reads this split of it
    row = tl.program_id(0) % per_head * TILE + tl.arange(0, TILE)
    own = S - Q + row % Q  # where in the tail a row's own token is
    across, across_v = tl.arange(0, D_BLOCK), tl.arange(0, DV_BLOCK)
    queries = tl.load(
        queries_at + (head * rows + row)[:, None] * D + across[None, :],
        mask=(row[:, None] < rows) & (across[None, :] < D),
        other=0.0,
    )
    most = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    sums = tl.zeros((TILE, DV_BLOCK), tl.float32)
    for first in range(begin, tl.minimum(end, kept), KEYS):
        block = first_block + first // G
        place = first % G + tl.arange(0, KEYS)
        there = place < tl.load(tokens_at + block)
        seen = there[None, :] & (row < rows)[:, None]
        in_key = across < D
        key_scale = tl.load(key_scale_at + block * D + across, mask=in_key, other=0).to(tl.float32)
        key_least = tl.load(key_least_at + block * D + across, mask=in_key, other=0).to(tl.float32)
        keys = _integers(
            key_codes_at + block * KEY_ROWS * G, across[:, None], place[None, :],
            in_key[:, None] & there[None, :], KEY_BITS, KEY_ROWS, G,
        )  # fmt: skip
        keys = (keys * key_scale[:, None] + key_least[:, None]).to(queries.dtype)
        scores = tl.dot(queries, keys, input_precision="ieee") * scaling
        weights, faded, most = _weigh(scores, seen, most, softcap, CAPPED)
        group = block * GROUPS + across_v // WIDTH
        in_value = there[:, None] & (across_v < DV)[None, :]
        of_group = group[None, :] * G + place[:, None]
        value_scale = tl.load(value_scale_at + of_group, mask=in_value, other=0).to(tl.float32)
        value_least = tl.load(value_least_at + of_group, mask=in_value, other=0).to(tl.float32)
        values = _integers(
            value_codes_at + group[None, :] * VALUE_ROWS * WIDTH, place[:, None],
            across_v[None, :] % WIDTH, in_value, VALUE_BITS, VALUE_ROWS, WIDTH,
        )  # fmt: skip
        values = (values * value_scale + value_least).to(queries.dtype)
        sums = sums * faded[:, None]
        sums += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * faded + tl.sum(weights, axis=1)
    for first in range(tl.maximum(begin - kept, 0), end - kept, KEYS):
        place = first + tl.arange(0, KEYS)
        seen = (place[None, :] <= own[:, None]) & (place < end - kept)[None, :]
        seen = seen & (row < rows)[:, None]
        most, total, sums = _step(
            queries,
            tail_keys_at + (head * apart + place) * D,
            tail_values_at + (head * apart + place) * DV, seen,
            most, total, sums, scaling, softcap, CAPPED, D, D_BLOCK, DV, DV_BLOCK,
        )  # fmt: skip
    slot = (head * splits + part) * rows + row
    tl.store(marks_at + slot * 2, most, mask=row < rows)
    tl.store(marks_at + slot * 2 + 1, total, mask=row < rows)
    tl.store(
        sums_at + slot[:, None] * DV + across_v[None, :],
        sums,
        mask=(row[:, None] < rows) & (across_v[None, :] < DV),
    )
