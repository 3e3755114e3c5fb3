"""The votes and their fading as Triton kernels, for CUDA; torch pools and gathers as fast.

The vote reads the keys twice. First every split of the keys computes for each row of queries its
highest score and the sum of its exponentials; the splits are then combined, two numbers per row.
Then every block of keys adds up what it receives from the rows, and from the query heads of its
group if they are reduced. No score leaves a multiprocessor. All sums are float32; scores are
multiplied by log2(e), because a multiprocessor computes powers of two only.

Importing this module imports triton; `snapkv.ops` does so only if the kernels are to run.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from snapkv.ops.scores import AttentionStates

_SPLIT_TOKENS = 256, 4096  # the smallest and the largest split of the first pass
_PROGRAMS = 512  # programs to aim at: a few for each multiprocessor of a large device
_BLOCK_BYTES = 65536  # keys that a program of the second pass holds
FLOAT32_TILES = 16, 16  # multiplied without tensor cores, out of registers
_FADED = 1024  # votes of one step of a program
_TOTALS = 32  # rows of queries whose splits a program puts together
# Factors must not become zero, because zero times minus infinity is NaN.
_LEAST_FACTOR = tl.constexpr(1e-37)
_LOG2_E = math.log2(math.e)


def window_votes(states: AttentionStates, *, group_reduce: str = "none") -> Tensor:
    """Compute the votes of the window on a GPU, without gradients.

    The arguments are those of `snapkv.ops.window_votes`.

    Returns:
        (B, Hkv, P) float32; (B, Hq, P) for "none".
    """
    inputs = KernelInputs.of(states)
    with torch.cuda.device_of(states.keys):
        return _votes(inputs, inputs.totals(states.score_options.sink_logits), group_reduce)


@dataclass(frozen=True, kw_only=True)
class KernelInputs:
    """The tensors and numbers that are passed to all kernels that compute votes.

    Attributes:
        queries: (B, Hq, W, D), contiguous.
        keys: (B, Hkv, T, D), contiguous along the last axis.
        pads: (B,) int64; an arbitrary tensor if there is no padding.
        numbers: Hkv, T, W, the strides of the keys, and the factors of `in_base_two`.
        common: the constants that kernels are compiled for.
    """

    queries: Tensor
    keys: Tensor
    pads: Tensor
    numbers: tuple[Any, ...]
    common: dict[str, Any]

    @classmethod
    def of(cls, states: AttentionStates) -> "KernelInputs":
        """Prepare the queries, the keys and the options of a layer for the kernels."""
        keys, options, pad_tokens = states.keys, states.score_options, states.pad_tokens
        keys = keys if keys.stride(-1) == 1 else keys.contiguous()
        queries, D = states.queries.contiguous(), states.queries.shape[3]
        slope, ceiling = options.scaling * _LOG2_E, 0.0
        if options.softcap is not None:  # c tanh(x / c) is c (2 sigmoid(2 x / c) - 1)
            slope, ceiling = 2 * options.scaling / options.softcap, options.softcap * _LOG2_E
        return cls(
            queries=queries,
            keys=keys,
            pads=queries if pad_tokens is None else pad_tokens.to(torch.int64),
            numbers=(*keys.shape[1:3], queries.shape[2], *keys.stride()[:3], slope, ceiling),
            common={
                "CAPPED": options.softcap is not None,
                "PADDED": pad_tokens is not None,
                "D": D,
                "D_BLOCK": max(16, triton.next_power_of_2(D)),
            },
        )

    @property
    def states(self) -> tuple[Tensor, Tensor, Tensor]:
        """The first arguments of each kernel: the queries, the keys and the padding."""
        return self.queries, self.keys, self.pads

    def totals(self, sinks: Tensor | None) -> Tensor:
        """Compute the logarithm of the sum of the exponentials in each row, to the base of two.

        Args:
            sinks: the learned sink logits, or None.

        Returns:
            (B * Hkv, G * W).
        """
        marks = _split_marks(self)
        if sinks is not None:  # one more split, of one exponential
            (B, Hq, W, _), heads = self.queries.shape, len(marks)
            column = sinks.float().mul(_LOG2_E).view(1, 1, Hq, 1).expand(B, 1, Hq, W)
            column = column.reshape(heads, 1, -1)
            of_sinks = torch.stack([column, torch.ones_like(column)], dim=-1)
            marks = torch.cat([marks, of_sinks], dim=1)
        return _put_together(marks)


def _split_marks(inputs: KernelInputs) -> Tensor:
    """Compute the highest score and the sum of the exponentials in each split.

    Returns:
        (B * Hkv, splits, G * W, 2).
    """
    (B, Hkv, T, _), (_, Hq, W, _) = inputs.keys.shape, inputs.queries.shape
    rows = Hq // Hkv * W
    tile, block = _first_tiles(inputs.keys, inputs.common["D_BLOCK"], rows)
    tiles = B * Hkv * triton.cdiv(rows, tile)
    split = split_tokens(T, tiles)
    marks = inputs.queries.new_empty(B * Hkv, triton.cdiv(T, split), rows, 2, dtype=torch.float32)
    blocks: dict[str, Any] = {"TILE": tile, "KEYS": block, "num_warps": 8 if tile == 128 else 4}
    launch = _sum_exponentials[(tiles, marks.shape[1])]
    launch(*inputs.states, marks, *inputs.numbers, rows, split, **blocks, **inputs.common)
    return marks


def split_tokens(tokens: int, tiles: int) -> int:
    """Return the number of tokens in each split, so that there are about `_PROGRAMS` programs.

    It is a power of two within the limits of `_SPLIT_TOKENS`, and so a multiple of every block of
    keys. The kernels need this, because they do not stop within a block.

    Args:
        tokens: how many tokens to split.
        tiles: how many programs each split has.
    """
    least, most = _SPLIT_TOKENS
    split: int = triton.next_power_of_2(triton.cdiv(tokens * tiles, _PROGRAMS))
    return min(most, max(least, split))


def _put_together(marks: Tensor) -> Tensor:
    """Combine the splits of each row into the logarithm of the sum of its exponentials.

    It is infinity for the row of a padding query, which sees nothing and so adds nothing. The base
    is two.

    Returns:
        (B * Hkv, G * W).
    """
    heads, splits, rows, _ = marks.shape
    totals = marks.new_empty(heads, rows)
    _total[(heads, triton.cdiv(rows, _TOTALS))](marks, totals, splits, rows, ROWS=_TOTALS)
    return totals


def _votes(inputs: KernelInputs, totals: Tensor, group_reduce: str) -> Tensor:
    """Add up the attention weights that each key receives.

    Args:
        inputs: the queries and keys.
        totals: what `KernelInputs.totals` returned.
        group_reduce: how the query heads of a KV head are combined.

    Returns:
        (B, Hkv, P), or (B, Hq, P) for "none", float32.
    """
    (B, Hq, W, _), (Hkv, T) = inputs.queries.shape, inputs.keys.shape[1:3]
    G, heads = Hq // Hkv, Hq if group_reduce == "none" else Hkv
    votes = inputs.queries.new_empty(B, heads, T - W, dtype=torch.float32)
    # For "mean" and "sum" the query heads of a group are one run of rows.
    heads, rows = (G, W) if group_reduce in ("none", "max") else (1, G * W)
    tile, block = _second_tiles(inputs.keys, inputs.common["D_BLOCK"], rows)
    share, each = 1 / G if group_reduce == "mean" else 1.0, group_reduce == "none"
    blocks: dict[str, Any] = {"TILE": tile, "KEYS": block, "num_warps": 8 if block == 256 else 4}
    if votes.numel():
        launch = _add_up[(triton.cdiv(T - W, block), B * Hkv)]
        launch(
            *inputs.states, totals, votes, *inputs.numbers, heads, rows, share,
            EACH=each, num_stages=2, **blocks, **inputs.common,
        )  # fmt: skip
    return votes


def _first_tiles(keys: Tensor, width: int, rows: int) -> tuple[int, int]:
    """Return the number of queries and keys that a program of the first pass handles at a time."""
    if keys.dtype == torch.float32:
        return FLOAT32_TILES
    most_rows = 128 if width <= 128 else 64
    return min(most_rows, max(16, triton.next_power_of_2(rows))), 64


def _second_tiles(keys: Tensor, width: int, rows: int) -> tuple[int, int]:
    """Return the number of queries and keys that a program of the second pass handles at a time."""
    if keys.dtype == torch.float32:
        return FLOAT32_TILES
    most_rows = 64 if width <= 128 else 32
    block = min(256, _BLOCK_BYTES // (width * keys.element_size()))
    return min(most_rows, max(16, triton.next_power_of_2(rows))), block


def fade_votes(votes: Tensor, decay: float) -> Tensor:
    """Fade the votes along the prefix with a kernel that computes no gradients.

    The arguments are those of `snapkv.ops.fade_votes`.

    Returns:
        A new tensor in the shape of `votes`, float32.
    """
    votes = votes.contiguous()
    faded = torch.empty_like(votes)
    B, H, P = votes.shape
    if votes.numel():
        with torch.cuda.device_of(votes):
            _fade[(B * H,)](votes, faded, P, max(decay, _LEAST_FACTOR.value), BLOCK=_FADED)
    return faded


@triton.jit
def in_base_two(products, slope, ceiling, CAPPED: tl.constexpr):
    """Convert the products of queries and keys into scores, multiplied by log2(e)."""
    if CAPPED:
        return ceiling * (2 * tl.sigmoid(slope * products) - 1)
    return slope * products


@triton.jit
def rows_at(at, begin, there, D: tl.constexpr, D_BLOCK: tl.constexpr):
    """Load the rows that begin at the given pointers, with zeros outside."""
    across = tl.arange(0, D_BLOCK)
    inside = there[:, None] & (across < D)[None, :]
    return tl.load(at + begin[:, None] + across[None, :], mask=inside, other=0.0)


@triton.jit
def rows_of_program(
    queries_at, T, W, rows, TILE: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr
):
    """Return the KV head of this program, its queries, and their indices and positions.

    The order is: head, indices, positions, queries.
    """
    tiles = tl.cdiv(rows, TILE)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    row = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    queries = rows_at(queries_at, (head * rows + row) * D, row < rows, D, D_BLOCK)
    return head, row, T - W + row % W, queries


@triton.jit
def first_token(pads_at, head, Hkv, PADDED: tl.constexpr):
    """Return the position of the first token in a row that is not padding."""
    first = 0
    if PADDED:
        first = tl.load(pads_at + head // Hkv).to(tl.int32)
    return first


@triton.jit
def _step(
    queries, keys_at, place, own, first, most, total, per_token, slope, ceiling, T,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, PADDED: tl.constexpr,
    D: tl.constexpr, D_BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the highest score and the sum of the exponentials with the next keys."""
    keys = rows_at(keys_at, place.to(tl.int64) * per_token, place < T, D, D_BLOCK)
    products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    scores = in_base_two(products, slope, ceiling, CAPPED)
    if MASKED:
        seen = place[None, :] <= own[:, None]
        if PADDED:
            seen = seen & (place >= first)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(most, tl.max(scores, axis=1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)  # rows that have seen nothing yet
    gained = tl.sum(tl.exp2(scores - shift[:, None]), axis=1)
    return higher, total * tl.exp2(most - shift) + gained


@triton.jit(do_not_specialize=["Hkv", "T", "W", "rows", "split"])
def _sum_exponentials(
    queries_at, keys_at, pads_at, marks_at,
    Hkv, T, W, per_batch, per_head, per_token, slope, ceiling, rows, split,
    CAPPED: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
    KEYS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute the sum of the exponentials of a tile of queries over one split of the keys."""
    head, row, own, queries = rows_of_program(queries_at, T, W, rows, TILE, D, D_BLOCK)
    part, first = tl.program_id(1), first_token(pads_at, head, Hkv, PADDED)
    start = keys_at + head // Hkv * per_batch + head % Hkv * per_head
    most = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    begin, end = part * split, tl.minimum((part + 1) * split, T)
    # Every row sees all keys before the window except padding.
    within = tl.maximum(begin, tl.minimum(end, T - W) // KEYS * KEYS)
    for at in range(begin, within, KEYS):
        most, total = _step(
            queries, start, at + tl.arange(0, KEYS), own, first, most, total, per_token, slope,
            ceiling, T, PADDED, CAPPED, PADDED, D, D_BLOCK,
        )  # fmt: skip
    for at in range(within, end, KEYS):
        most, total = _step(
            queries, start, at + tl.arange(0, KEYS), own, first, most, total, per_token, slope,
            ceiling, T, True, CAPPED, PADDED, D, D_BLOCK,
        )  # fmt: skip
    slot = (head * tl.num_programs(1) + part) * rows + row
    tl.store(marks_at + slot * 2, most, mask=row < rows)
    tl.store(marks_at + slot * 2 + 1, total, mask=row < rows)


@triton.jit(do_not_specialize=["splits", "rows"])
def _total(marks_at, totals_at, splits, rows, ROWS: tl.constexpr):
    """Combine the results of all splits, for some of the queries of one KV head."""
    head, row = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for split in range(0, splits):
        slot = ((head * splits + split) * rows + row) * 2
        highest = tl.load(marks_at + slot, mask=row < rows, other=float("-inf"))
        of_split = tl.load(marks_at + slot + 1, mask=row < rows, other=0.0)
        higher = tl.maximum(most, highest)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(most - shift) + of_split * tl.exp2(highest - shift)
        most = higher
    sum_of_all = tl.where(total == 0, float("inf"), most + tl.log2(total))
    tl.store(totals_at + head * rows + row, sum_of_all, mask=row < rows)


@triton.jit(do_not_specialize=["Hkv", "T", "W", "heads", "rows"])
def _add_up(
    queries_at, keys_at, pads_at, totals_at, votes_at,
    Hkv, T, W, per_batch, per_head, per_token, slope, ceiling, heads, rows, share,
    EACH: tl.constexpr,
    CAPPED: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
    KEYS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add up the attention that one block of the prefix receives from the window.

    There is one program for each block of KEYS keys and each KV head of a batch row. The queries
    of this KV head are `heads` runs of `rows` queries, and `totals_at` points to what
    `KernelInputs.totals` returned. Each run gives every key one sum of attention weights. With
    EACH, all of these sums are stored in `votes_at`, and `share` is not used. Otherwise the largest
    of them is stored, multiplied by `share`. The whole window sees the prefix, so only padding is
    hidden.
    """
    head, prefix = tl.program_id(1).to(tl.int64), T - W
    place = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    there = place < prefix
    start = keys_at + head // Hkv * per_batch + head % Hkv * per_head
    keys = rows_at(start, place.to(tl.int64) * per_token, there, D, D_BLOCK)
    is_token = there
    if PADDED:
        is_token = there & (place >= tl.load(pads_at + head // Hkv))
    received = tl.zeros((KEYS,), tl.float32)
    for member in range(0, heads):
        votes = tl.zeros((KEYS,), tl.float32)
        for begin in range(0, rows, TILE):
            row = begin + tl.arange(0, TILE)
            slot = (head * heads + member) * rows + row
            queries = rows_at(queries_at, slot * D, row < rows, D, D_BLOCK)
            totals = tl.load(totals_at + slot, mask=row < rows, other=float("inf"))
            products = tl.dot(keys, tl.trans(queries), input_precision="ieee")
            scores = in_base_two(products, slope, ceiling, CAPPED)
            votes += tl.sum(tl.exp2(scores - totals[None, :]), axis=1)
        votes = tl.where(is_token, votes, 0.0)
        if EACH:
            tl.store(votes_at + (head * heads + member) * prefix + place, votes, mask=there)
        else:
            received = tl.maximum(received, votes, propagate_nan=tl.PropagateNan.ALL)
    if not EACH:
        tl.store(votes_at + head * prefix + place, received * share, mask=there)


@triton.jit
def _behind(factor, faded, next_factor, next_faded):
    """Combine two consecutive runs of votes into one.

    Returns the factor of both runs together, and the faded vote at the end of the second run.
    """
    both = tl.maximum(factor * next_factor, _LEAST_FACTOR)
    return both, tl.maximum(next_faded, next_factor * faded)


@triton.jit(do_not_specialize=["P"])
def _fade(votes_at, faded_at, P, decay, BLOCK: tl.constexpr):
    """Raise each vote of one head to the largest earlier one, which falls by `decay` per position.

    One program computes a head, one block of positions after the other.
    """
    start = tl.program_id(0).to(tl.int64) * P
    across = tl.arange(0, BLOCK)
    carried = float("-inf")
    for begin in range(0, P, BLOCK):
        place = begin + across
        votes = tl.load(votes_at + start + place, mask=place < P, other=float("-inf"))
        # What earlier blocks carry on to this one enters at its first position.
        votes = tl.where(across == 0, tl.maximum(votes, decay * carried), votes)
        factor = tl.zeros((BLOCK,), tl.float32) + decay
        _, faded = tl.associative_scan((factor, votes), 0, _behind)
        tl.store(faded_at + start + place, faded, mask=place < P)
        carried = tl.max(tl.where(across == BLOCK - 1, faded, float("-inf")), axis=0)
