"""The largest votes, faded query by query, as Triton kernels for CUDA.

The weights of a query fade along the prefix, by a factor for each position. In logarithms a factor
is a slope, and what is carried on to a position is the highest point of all those lines. The keys
are read four times: for the sum of each row's exponentials; for what every split carries on by
itself; for the sum of the weights and of the faded weights, with what earlier splits carry on; and
for the largest of a block's scaled weights. No weight leaves a multiprocessor. Logarithms are to
the base of two, sums float32.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from snapkv.ops.scores import AttentionStates
from snapkv.ops.votes.lifts import Fading
from snapkv.ops.votes.reference import LEAST_SUM, reduce_group
from snapkv.ops.votes.triton import (
    FLOAT32_TILES,
    KernelInputs,
    first_token,
    in_base_two,
    rows_at,
    rows_of_program,
    split_tokens,
)

_NOTHING = 150.0
"""How many powers of two below one there is no float32 any more."""


def largest_votes(
    states: AttentionStates,
    lift: Fading,
    *,
    prefix_tokens: int,
    sink_tokens: int = 0,
    group_reduce: str = "none",
) -> tuple[Tensor, Tensor]:
    """Compute the largest vote on each position on a GPU, without gradients.

    The arguments are those of `snapkv.ops.largest_votes`.

    Returns:
        The largest votes and the sums of unpooled weights, both (B, Hkv, P) float32; (B, Hq, P) for
        "none".
    """
    inputs, queries = KernelInputs.of(states), states.queries
    (B, Hq, W, _), Hkv = queries.shape, states.keys.shape[1]
    each = group_reduce != "max"
    shape = B, Hq if each else Hkv, prefix_tokens
    largest, summed = queries.new_empty(2, *shape, dtype=torch.float32)
    if largest.numel():
        with torch.cuda.device_of(queries):
            totals = inputs.totals(states.score_options.sink_logits)
            fades = _Fades(inputs, totals, lift.decay, prefix_tokens, sink_tokens)
            starts, scales = fades.starts_and_scales()
            _largest[(starts.shape[1], B * Hkv)](
                *inputs.states, totals, starts, scales, largest, summed, *inputs.numbers,
                Hq // Hkv, *fades.numbers, EACH=each, TILE=fades.tile(W), **fades.common,
            )  # fmt: skip
    reduced = group_reduce if each else "none"
    return reduce_group(largest, Hkv, reduced), reduce_group(summed, Hkv, reduced)


class _Fades:
    """Computes how the attention weights of each query fade along the prefix."""

    def __init__(
        self,
        inputs: KernelInputs,
        totals: Tensor,
        decay: float,
        prefix_tokens: int,
        sink_tokens: int,
    ) -> None:
        wide, is_float32 = inputs.common["D_BLOCK"] > 128, inputs.keys.dtype == torch.float32
        self._most_rows, keys = FLOAT32_TILES if is_float32 else (32 if wide else 64, 128)
        self._fading = max(math.log2(decay), -_NOTHING)
        self.numbers = prefix_tokens, sink_tokens, self._fading
        self.common: dict[str, Any] = {
            "KEYS": keys,
            "num_stages": 1,
            "num_warps": 8,
            **inputs.common,
        }
        self._inputs, self._totals, self._prefix = inputs, totals, prefix_tokens

    def tile(self, rows: int) -> int:
        """Return the number of rows in each tile.

        Args:
            rows: how many rows lie together.
        """
        return min(self._most_rows, max(16, int(triton.next_power_of_2(rows))))

    def starts_and_scales(self) -> tuple[Tensor, Tensor]:
        """Compute the weight with which each block of keys begins, and the factor of each row.

        Returns:
            (B * Hkv, blocks, G * W) float32 logarithms, and (B * Hkv, G * W) float32.
        """
        heads, rows = self._totals.shape
        options: dict[str, Any] = {"TILE": self.tile(rows), **self.common}
        tiles = heads * triton.cdiv(rows, options["TILE"])
        split = split_tokens(self._prefix, tiles)
        carried = self._totals.new_empty(heads, triton.cdiv(self._prefix, split), rows)
        blocks = triton.cdiv(self._prefix, self.common["KEYS"])
        starts = self._totals.new_empty(heads, blocks, rows)
        sums = carried.new_empty(2, *carried.shape)
        grid, read = (tiles, carried.shape[1]), (*self._inputs.states, self._totals)
        numbers = *self._inputs.numbers, rows, split, *self.numbers
        _carry[grid](*read, carried, *numbers, **options)
        reach = math.ceil(min(_NOTHING / -self._fading / split, carried.shape[1])) + 1
        _sum_faded[grid](*read, carried, starts, sums, *numbers, reach, **options)
        own, faded = sums.sum(dim=2)
        return starts, own / faded.clamp_(min=LEAST_SUM)


@triton.jit
def _logarithms(
    queries, keys, totals, place, own, first, prefix, slope, ceiling, CAPPED: tl.constexpr
):
    """Compute the logarithms of the attention weights of a tile of queries.

    They are minus infinity for keys that a query cannot see.
    """
    products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    scores = in_base_two(products, slope, ceiling, CAPPED)
    seen = (place[None, :] <= own[:, None]) & (place >= first)[None, :] & (place < prefix)[None, :]
    return tl.where(seen, scores - totals[:, None], float("-inf"))


@triton.jit
def _higher(one, other):
    return tl.maximum(one, other)


@triton.jit
def _faded(logarithms, carried, fading, KEYS: tl.constexpr):
    """Fade the logarithms of a block of keys, beginning with the value from the block before it."""
    down = fading * tl.arange(0, KEYS)
    within = tl.associative_scan(logarithms - down[None, :], 1, _higher) + down[None, :]
    behind = carried[:, None] + (down + fading)[None, :]
    return tl.maximum(logarithms, tl.maximum(within, behind))


@triton.jit(do_not_specialize=["Hkv", "T", "W", "rows", "split", "prefix", "sinks"])
def _carry(
    queries_at, keys_at, pads_at, totals_at, carried_at,
    Hkv, T, W, per_batch, per_head, per_token, slope, ceiling, rows, split, prefix, sinks, fading,
    CAPPED: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
    KEYS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute for each query what is left of its weights at the end of one split of the keys.

    That is the largest of the weights, after each has fallen by the decay with every key after its
    own. Weights of earlier splits, which also reach into this one, are not included.
    """
    head, row, own, queries = rows_of_program(queries_at, T, W, rows, TILE, D, D_BLOCK)
    part, first = tl.program_id(1), first_token(pads_at, head, Hkv, PADDED) + sinks
    totals = tl.load(totals_at + head * rows + row, mask=row < rows, other=float("inf"))
    start = keys_at + head // Hkv * per_batch + head % Hkv * per_head
    away = fading * (KEYS - 1 - tl.arange(0, KEYS))
    carried = tl.full((TILE,), float("-inf"), tl.float32)
    for at in range(part * split, tl.minimum((part + 1) * split, prefix), KEYS):
        place = at + tl.arange(0, KEYS)
        keys = rows_at(start, place.to(tl.int64) * per_token, place < prefix, D, D_BLOCK)
        logarithms = _logarithms(
            queries, keys, totals, place, own, first, prefix, slope, ceiling, CAPPED
        )
        carried = tl.maximum(carried + fading * KEYS, tl.max(logarithms + away[None, :], axis=1))
    slot = (head * tl.num_programs(1) + part) * rows + row
    tl.store(carried_at + slot, carried, mask=row < rows)


@triton.jit(do_not_specialize=["Hkv", "T", "W", "rows", "split", "prefix", "sinks", "reach"])
def _sum_faded(
    queries_at, keys_at, pads_at, totals_at, carried_at, starts_at, sums_at,
    Hkv, T, W, per_batch, per_head, per_token, slope, ceiling, rows, split, prefix, sinks, fading,
    reach,
    CAPPED: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
    KEYS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute the sums of the weights and of the faded weights in one split of the keys.

    Stores what each block of the split starts with, too.
    """
    head, row, own, queries = rows_of_program(queries_at, T, W, rows, TILE, D, D_BLOCK)
    part, parts, there = tl.program_id(1), tl.num_programs(1), row < rows
    first = first_token(pads_at, head, Hkv, PADDED) + sinks
    totals = tl.load(totals_at + head * rows + row, mask=there, other=float("inf"))
    start = keys_at + head // Hkv * per_batch + head % Hkv * per_head
    across = tl.arange(0, KEYS)
    carried = tl.full((TILE,), float("-inf"), tl.float32)
    for earlier in range(tl.maximum(part - reach, 0), part):
        of_part = tl.load(
            carried_at + (head * parts + earlier) * rows + row, mask=there, other=float("-inf")
        )
        carried = tl.maximum(carried + fading * split, of_part)
    weights = tl.zeros((TILE,), tl.float32)
    faded_weights = tl.zeros((TILE,), tl.float32)
    for at in range(part * split, tl.minimum((part + 1) * split, prefix), KEYS):
        block = head * tl.cdiv(prefix, KEYS) + at // KEYS
        tl.store(starts_at + block * rows + row, carried, mask=there)
        place = at + across
        keys = rows_at(start, place.to(tl.int64) * per_token, place < prefix, D, D_BLOCK)
        logarithms = _logarithms(
            queries, keys, totals, place, own, first, prefix, slope, ceiling, CAPPED
        )
        faded = _faded(logarithms, carried, fading, KEYS)
        weights += tl.sum(tl.exp2(logarithms), axis=1)
        faded_weights += tl.sum(tl.where((place < prefix)[None, :], tl.exp2(faded), 0.0), axis=1)
        carried = tl.max(tl.where((across == KEYS - 1)[None, :], faded, float("-inf")), axis=1)
    slot = (head * parts + part) * rows + row
    tl.store(sums_at + slot, weights, mask=there)
    both = tl.num_programs(0) // tl.cdiv(rows, TILE) * parts
    tl.store(sums_at + both * rows + slot, faded_weights, mask=there)


@triton.jit(do_not_specialize=["Hkv", "T", "W", "members", "prefix", "sinks"])
def _largest(
    queries_at, keys_at, pads_at, totals_at, starts_at, scales_at, largest_at, summed_at,
    Hkv, T, W, per_batch, per_head, per_token, slope, ceiling, members, prefix, sinks, fading,
    EACH: tl.constexpr,
    CAPPED: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
    KEYS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute the largest vote that each position of one block receives.

    The voters are those of one KV head's query heads. Stores the largest faded weight and the sum
    of all weights, of each query head or the largest of these.
    """
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = block * KEYS + tl.arange(0, KEYS)
    there, rows = place < prefix, members * W
    start = keys_at + head // Hkv * per_batch + head % Hkv * per_head
    keys = rows_at(start, place.to(tl.int64) * per_token, there, D, D_BLOCK)
    first = first_token(pads_at, head, Hkv, PADDED)
    lifts = (place >= first + sinks)[None, :]
    best, most = tl.zeros((KEYS,), tl.float32), tl.zeros((KEYS,), tl.float32)
    for member in range(0, members):
        highest, votes = tl.zeros((KEYS,), tl.float32), tl.zeros((KEYS,), tl.float32)
        for begin in range(0, W, TILE):
            voter = begin + tl.arange(0, TILE)
            votes_at_all, row = voter < W, member * W + voter
            slot = head * rows + row
            queries = rows_at(queries_at, slot * D, votes_at_all, D, D_BLOCK)
            totals = tl.load(totals_at + slot, mask=votes_at_all, other=float("inf"))
            scales = tl.load(scales_at + slot, mask=votes_at_all, other=0.0)
            at_start = (head * tl.num_programs(0) + block) * rows + row
            carried = tl.load(starts_at + at_start, mask=votes_at_all, other=float("-inf"))
            logarithms = _logarithms(
                queries, keys, totals, place, T - W + voter, first, prefix, slope, ceiling, CAPPED
            )
            faded = _faded(tl.where(lifts, logarithms, float("-inf")), carried, fading, KEYS)
            weights = tl.exp2(logarithms)
            lifted = tl.where(lifts, tl.exp2(faded) * scales[:, None], weights)
            highest = tl.maximum(highest, tl.max(lifted, axis=0))
            votes += tl.sum(weights, axis=0)
        highest = tl.where(votes == votes, highest, votes)  # NaN, which a maximum may lose
        if EACH:
            slots = (head * members + member) * prefix + place
            tl.store(largest_at + slots, highest, mask=there)
            tl.store(summed_at + slots, votes, mask=there)
        else:
            best = tl.maximum(best, highest, propagate_nan=tl.PropagateNan.ALL)
            most = tl.maximum(most, votes, propagate_nan=tl.PropagateNan.ALL)
    if not EACH:
        tl.store(largest_at + head * prefix + place, best, mask=there)
        tl.store(summed_at + head * prefix + place, most, mask=there)
