"""Attention to heads of different lengths as two Triton kernels, for CUDA.

Split-k over flat states: a program takes one head, a tile of its rows of queries (the group's query
heads together) and one split of what the head sees, which is what it keeps and then its tail.
Splits are of equal size, so a long head has more of them and no program works longer than the
others. A second kernel combines a head's splits. All sums are float32.

Importing this module imports triton; `snapkv.ops` does so only if the kernel is to run.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from snapkv.ops.ragged.inputs import TailInputs
from snapkv.ops.ragged.layout import RaggedLayout

_SPLIT_TOKENS = 64, 1024  # the smallest and the largest split
_PROGRAMS = 1024  # splits to aim at: a few for each multiprocessor of a large device


def ragged_attention(
    inputs: TailInputs, keys: Tensor, values: Tensor, layout: RaggedLayout
) -> Tensor:
    """Compute attention to the kept tokens on a GPU, without gradients.

    The arguments are those of `snapkv.ops.ragged_attention`.

    Returns:
        (B, Hq, Q, Dv), in the dtype of the tail's values.
    """
    keys, values, starts = keys.contiguous(), values.contiguous(), layout.starts

    def attend(grid: tuple[int, int], *shared: Any, **compiled: Any) -> None:
        _attend_split[grid](inputs.queries.contiguous(), keys, values, starts, *shared, **compiled)

    sizes = starts, len(keys), layout.longest_tokens
    return in_splits(attend, inputs, sizes, tiles(inputs) | {"num_stages": 2})


def in_splits(
    attend: Callable[..., None],
    inputs: TailInputs,
    kept: tuple[Tensor, int, int],
    blocks: dict[str, Any],
) -> Tensor:
    """Run an attention kernel on each split of the keys, and combine the results.

    Args:
        attend: launches the kernel on a grid, with the arguments that all of these kernels share,
            from the tail on.
        inputs: as in `ragged_attention`.
        kept: where each head begins, (B * H + 1,), how many tokens all heads keep, and the longest
            head.
        blocks: the tile sizes that the kernel is compiled for, see `tiles`.

    Returns:
        (B, Hq, Q, Dv).
    """
    queries, tail_tokens, options = inputs.queries, inputs.tail_tokens, inputs.score_options
    softcap, sinks = options.softcap, options.sink_logits
    (B, Hq, Q, D), (_, H, S, Dv) = queries.shape, inputs.tail_values.shape
    (starts, kept_tokens, longest), rows = kept, Hq // H * Q
    tail_keys, tail_values, apart = in_rows(inputs.tail_keys, inputs.tail_values)
    split = split_tokens(kept_tokens + B * H * S)
    splits = triton.cdiv(longest + S, split)
    sums = queries.new_empty(B * H, splits, rows, Dv, dtype=torch.float32)
    # Highest score and sum of exponentials, of each split.
    marks = queries.new_empty(B * H, splits, rows, 2, dtype=torch.float32)
    output = tail_values.new_empty(B, Hq, Q, Dv)
    common: dict[str, Any] = {"DV": Dv, "DV_BLOCK": max(16, triton.next_power_of_2(Dv))}
    common["COUNTED"] = tail_tokens is not None
    sizes = (starts if tail_tokens is None else tail_tokens, rows, Q, S, split, splits)
    logits = sums if sinks is None else sinks.float().contiguous()
    with torch.cuda.device_of(queries):
        attend(
            (B * H * triton.cdiv(rows, blocks["TILE"]), splits),
            tail_keys, tail_values, sums, marks, *sizes, apart,
            options.scaling, softcap or 0.0, CAPPED=softcap is not None,
            D=D, D_BLOCK=max(16, triton.next_power_of_2(D)), **blocks, **common,
        )  # fmt: skip
        merge = _put_together[(B * H, rows)]
        merge(sums, marks, starts, logits, output, *sizes, H, HAS_SINKS=sinks is not None, **common)
    return output


def in_rows(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return the keys and values of the tail in a layout that the kernels can read.

    An append buffer has room after each head, which the kernels can skip; other layouts are copied.

    Returns:
        The keys (B, H, S, D), the values (B, H, S, Dv), and how many tokens lie between the first
        tokens of two heads.
    """
    apart = keys.stride(1) // keys.shape[3]
    if all(_lies_apart(states, apart) for states in (keys, values)):
        return keys, values, apart
    return keys.contiguous(), values.contiguous(), keys.shape[2]


def _lies_apart(states: Tensor, tokens: int) -> bool:
    _, H, _, D = states.shape
    return states.stride() == (H * tokens * D, tokens * D, D, 1)


def tiles(inputs: TailInputs, most: int = 64) -> dict[str, int]:
    """Return the number of queries and keys that a program handles at a time.

    More would not fit into the registers.

    Args:
        inputs: the arguments of the attention call.
        most: the most queries or keys for heads of up to 128 channels; half of it for wider ones.
            For float32 it is always 16.

    Returns:
        The constants of the kernel: TILE, the rows of queries, and KEYS.
    """
    (_, Hq, Q, D), H = inputs.queries.shape, inputs.tail_keys.shape[1]
    if max(D, inputs.tail_values.shape[3]) > 128:
        most //= 2
    if inputs.queries.dtype == torch.float32:  # multiplied without tensor cores
        most = 16
    return {"TILE": min(most, max(16, triton.next_power_of_2(Hq // H * Q))), "KEYS": most}


def split_tokens(tokens: int) -> int:
    """Return the number of tokens in each split of `tokens` tokens.

    It is a power of two, for about `_PROGRAMS` splits.
    """
    least, most = _SPLIT_TOKENS
    return min(most, max(least, int(triton.next_power_of_2(triton.cdiv(tokens, _PROGRAMS)))))


@triton.jit
def _weigh(scores, seen, most, softcap, CAPPED: tl.constexpr):
    """Compute the unnormalised weights of the scores, and update the maximum.

    Returns the weights, the factor by which earlier sums must be multiplied, and the new maximum.
    """
    if CAPPED:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # tanh
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(most, tl.max(scores, axis=1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)  # rows that have seen nothing yet
    weights = tl.exp(scores - shift[:, None])
    faded = tl.exp(most - shift)
    return weights, faded, higher


@triton.jit
def _step(
    queries, key_rows, value_rows, seen, most, total, sums, scaling, softcap,
    CAPPED: tl.constexpr,
    D: tl.constexpr, D_BLOCK: tl.constexpr, DV: tl.constexpr, DV_BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the sums of a tile of queries with the next keys and values.

    `seen` is (TILE, KEYS); `key_rows` and `value_rows` are pointers, (KEYS,).
    """
    across, across_v = tl.arange(0, D_BLOCK), tl.arange(0, DV_BLOCK)
    there = tl.max(seen.to(tl.int32), axis=0) > 0
    inside = there[:, None] & (across[None, :] < D)
    keys = tl.load(key_rows[:, None] + across[None, :], mask=inside, other=0.0)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scaling
    weights, faded, most = _weigh(scores, seen, most, softcap, CAPPED)
    inside_v = there[:, None] & (across_v[None, :] < DV)
    values = tl.load(value_rows[:, None] + across_v[None, :], mask=inside_v, other=0.0)
    sums = sums * faded[:, None]
    sums += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return most, total * faded + tl.sum(weights, axis=1), sums


@triton.jit(do_not_specialize=["rows", "Q", "S", "split", "splits", "apart"])
def _attend_split(
    queries_at, keys_at, values_at, starts_at, tail_keys_at, tail_values_at, sums_at, marks_at,
    count_at, rows, Q, S, split, splits, apart, scaling, softcap,
    CAPPED: tl.constexpr, COUNTED: tl.constexpr,
    D: tl.constexpr, D_BLOCK: tl.constexpr, DV: tl.constexpr, DV_BLOCK: tl.constexpr,
    TILE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the attention of a tile of queries to one split of the keys.

    Stores the weighted sums, the maximum and the total.
    """
    if COUNTED:
        S = tl.load(count_at).to(tl.int32)
    per_head = tl.cdiv(rows, TILE)
    head = (tl.program_id(0) // per_head).to(tl.int64)
    part = tl.program_id(1)
    start = tl.load(starts_at + head)
    kept = (tl.load(starts_at + head + 1) - start).to(tl.int32)
    begin = part * split
    end = tl.minimum(begin + split, kept + S)
    if begin >= end:
        return  # this head is shorter than the longest, and nothing reads this split of it
    row = tl.program_id(0) % per_head * TILE + tl.arange(0, TILE)
    own = S - Q + row % Q  # where in the tail a row's own token is
    across, across_v = tl.arange(0, D_BLOCK), tl.arange(0, DV_BLOCK)
    inside = (row[:, None] < rows) & (across[None, :] < D)
    asked = queries_at + (head * rows + row)[:, None] * D + across[None, :]
    queries = tl.load(asked, mask=inside, other=0.0)
    most = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    sums = tl.zeros((TILE, DV_BLOCK), tl.float32)
    for first in range(begin, tl.minimum(end, kept), KEYS):
        place = first + tl.arange(0, KEYS)
        seen = (place < tl.minimum(end, kept))[None, :] & (row < rows)[:, None]
        most, total, sums = _step(
            queries, keys_at + (start + place) * D, values_at + (start + place) * DV, seen,
            most, total, sums, scaling, softcap, CAPPED, D, D_BLOCK, DV, DV_BLOCK,
        )  # fmt: skip
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
    inside_v = (row[:, None] < rows) & (across_v[None, :] < DV)
    tl.store(sums_at + slot[:, None] * DV + across_v[None, :], sums, mask=inside_v)


@triton.jit(do_not_specialize=["rows", "Q", "S", "split", "splits", "H"])
def _put_together(
    sums_at, marks_at, starts_at, sinks_at, output_at,
    count_at, rows, Q, S, split, splits, H,
    HAS_SINKS: tl.constexpr, COUNTED: tl.constexpr, DV: tl.constexpr, DV_BLOCK: tl.constexpr,
):  # fmt: skip
    """Combine the results of all splits for one row of queries, including its attention sink."""
    if COUNTED:
        S = tl.load(count_at).to(tl.int32)
    head, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kept = (tl.load(starts_at + head + 1) - tl.load(starts_at + head)).to(tl.int32)
    across = tl.arange(0, DV_BLOCK)
    most = float("-inf")
    total = 0.0
    if HAS_SINKS:
        most = tl.load(sinks_at + head % H * (rows // Q) + row // Q)
        total = 1.0
    sums = tl.zeros((DV_BLOCK,), tl.float32)
    for part in range(0, tl.cdiv(kept + S, split)):
        slot = (head * splits + part) * rows + row
        mark = tl.load(marks_at + slot * 2)
        higher = tl.maximum(most, mark)
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen in the splits so far
        faded, gained = tl.exp(most - shift), tl.exp(mark - shift)
        of_split = tl.load(sums_at + slot * DV + across, mask=across < DV, other=0.0)
        sums = sums * faded + of_split * gained
        total = total * faded + tl.load(marks_at + slot * 2 + 1) * gained
        most = higher
    output = (sums / total).to(output_at.dtype.element_ty)
    tl.store(output_at + (head * rows + row) * DV + across, output, mask=across < DV)
