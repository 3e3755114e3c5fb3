"""The vote, its pooling and the gather as Triton kernels, for CUDA.

The vote reads the keys twice. First every split of the keys tells each row of queries its highest
score and the sum of its exponentials; the splits are put together in torch, two numbers per row.
Then every block of keys adds up what it receives from the rows, and from the query heads of its
group where they are reduced. No score leaves a multiprocessor. All sums are float32.

Importing this module imports triton; `snapkv.ops.api` does so only where the kernels are to run.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_SPLIT_TOKENS = 256, 4096  # the smallest and the largest split of the first pass
_PROGRAMS = 1024  # programs to aim at: a few for each multiprocessor of a large device
_POOLED = 1024  # votes of one program
_GATHERED = 32  # rows of one program


def window_votes(
    queries: Tensor,
    keys: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    pad_tokens: Tensor | None = None,
    group_reduce: str = "none",
) -> Tensor:
    """As `snapkv.ops.window_votes`; no gradients."""
    B, Hq, W, D = queries.shape
    Hkv, T = keys.shape[1], keys.shape[2]
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    queries = queries.contiguous()
    # Keys of one step and rows of queries; float32 fills shared memory twice as fast.
    block, most_rows = (32, 32) if keys.dtype == torch.float32 else (64, 64)
    common: dict[str, Any] = {
        "CAPPED": softcap is not None,
        "PADDED": pad_tokens is not None,
        "D": D,
        "D_BLOCK": max(16, triton.next_power_of_2(D)),
        "KEYS": block,
    }
    pads = queries if pad_tokens is None else pad_tokens.to(torch.int64)
    numbers = (Hkv, T, W, *keys.stride()[:3], scaling, softcap or 0.0)
    with torch.cuda.device_of(keys):
        marks = _split_marks(queries, keys, pads, numbers, most_rows, common)
        if sinks is not None:  # one more split, of one exponential
            column = sinks.float().view(1, 1, Hq, 1).expand(B, 1, Hq, W).reshape(B * Hkv, 1, -1)
            of_sinks = torch.stack([column, torch.ones_like(column)], dim=-1)
            marks = torch.cat([marks, of_sinks], dim=1)
        highest, shares = _put_together(marks)
        heads = Hq if group_reduce == "none" else Hkv
        votes = queries.new_empty(B, heads, T - W, dtype=torch.float32)
        if votes.numel():
            _add_up[(triton.cdiv(T - W, block), B * Hkv)](
                queries,
                keys,
                pads,
                highest,
                shares,
                votes,
                *numbers,
                Hq // Hkv,
                REDUCE=group_reduce,
                TILE=min(most_rows, max(16, triton.next_power_of_2(W))),
                **common,
            )
    return votes


def _split_marks(
    queries: Tensor,
    keys: Tensor,
    pads: Tensor,
    numbers: tuple[Any, ...],
    most_rows: int,
    common: dict[str, Any],
) -> Tensor:
    """Highest score and sum of exponentials per split and row: (B * Hkv, splits, G * W, 2)."""
    B, Hkv, T, _ = keys.shape
    rows = queries.shape[1] // Hkv * queries.shape[2]
    tile = min(most_rows, max(16, triton.next_power_of_2(rows)))
    tiles = B * Hkv * triton.cdiv(rows, tile)
    least, most = _SPLIT_TOKENS
    split = min(most, max(least, triton.next_power_of_2(triton.cdiv(T * tiles, _PROGRAMS))))
    marks = queries.new_empty(B * Hkv, triton.cdiv(T, split), rows, 2, dtype=torch.float32)
    _sum_exponentials[(tiles, marks.shape[1])](
        queries, keys, pads, marks, *numbers, rows, split, TILE=tile, **common
    )
    return marks


def _put_together(marks: Tensor) -> tuple[Tensor, Tensor]:
    """Highest score and one over the sum of exponentials of every row: (B * Hkv, G * W) each."""
    highest, sums = marks.unbind(dim=-1)
    most = highest.amax(dim=1, keepdim=True)
    most = most.masked_fill(most.isneginf(), 0.0)  # the row of a pad, which sees nothing
    total = (sums * (highest - most).exp()).sum(dim=1)
    return most.squeeze(1), total.masked_fill(total == 0, 1.0).reciprocal()


def pool_votes(votes: Tensor, kernel_size: int, pooling: str) -> Tensor:
    """As `snapkv.ops.pool_votes`."""
    votes = votes.contiguous()
    pooled = torch.empty_like(votes)
    B, H, P = votes.shape
    if votes.numel():
        with torch.cuda.device_of(votes):
            _pool[(B * H, triton.cdiv(P, _POOLED))](
                votes, pooled, P, KERNEL=kernel_size, MAX=pooling == "max", BLOCK=_POOLED
            )
    return pooled


def gather_tokens(states: Tensor, keep_indices: Tensor) -> Tensor:
    """As `snapkv.ops.gather_tokens`; no gradients."""
    B, Hs, _, D = states.shape
    states = states if states.stride(-1) == 1 else states.contiguous()
    heads, K = max(keep_indices.shape[1], Hs), keep_indices.shape[2]
    keep_indices = keep_indices.expand(-1, heads, -1)
    kept = states.new_empty(B, heads, K, D)
    if kept.numel():
        with torch.cuda.device_of(states):
            _gather[(B * heads, triton.cdiv(K, _GATHERED))](
                states,
                keep_indices,
                kept,
                heads,
                heads // Hs,
                K,
                *states.stride()[:3],
                *keep_indices.stride(),
                D=D,
                D_BLOCK=triton.next_power_of_2(D),
                ROWS=_GATHERED,
            )
    return kept


@triton.jit
def _scores(
    queries, key_rows, place, row, rows, own, first, scaling, softcap, T,
    CAPPED: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
):  # fmt: skip
    """Scores of a tile of rows on some keys, minus infinity where a row does not see a key."""
    across = tl.arange(0, D_BLOCK)
    keys = tl.load(
        key_rows[:, None] + across[None, :],
        mask=(place < T)[:, None] & (across < D)[None, :],
        other=0.0,
    )
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scaling
    if CAPPED:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # tanh
    seen = (place[None, :] <= own[:, None]) & (row < rows)[:, None]
    if PADDED:
        seen = seen & (place >= first)[None, :]
    return tl.where(seen, scores, float("-inf"))


@triton.jit(do_not_specialize=["Hkv", "T", "W", "rows", "split"])
def _sum_exponentials(
    queries_at, keys_at, pads_at, marks_at,
    Hkv, T, W, per_batch, per_head, per_token, scaling, softcap, rows, split,
    CAPPED: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
    KEYS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of one KV head's rows over one split of its keys."""
    tiles = tl.cdiv(rows, TILE)
    head, part = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1)
    row = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    own = T - W + row % W
    across = tl.arange(0, D_BLOCK)
    queries = tl.load(
        queries_at + (head * rows + row)[:, None] * D + across[None, :],
        mask=(row < rows)[:, None] & (across < D)[None, :],
        other=0.0,
    )
    first = 0
    if PADDED:
        first = tl.load(pads_at + head // Hkv)
    start = keys_at + head // Hkv * per_batch + head % Hkv * per_head
    most = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    for begin in range(part * split, tl.minimum((part + 1) * split, T), KEYS):
        place = begin + tl.arange(0, KEYS)
        scores = _scores(
            queries, start + place.to(tl.int64) * per_token, place, row, rows, own, first,
            scaling, softcap, T, CAPPED, PADDED, D, D_BLOCK,
        )  # fmt: skip
        higher = tl.maximum(most, tl.max(scores, axis=1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # rows that have seen nothing yet
        total = total * tl.exp(most - shift) + tl.sum(tl.exp(scores - shift[:, None]), axis=1)
        most = higher
    slot = (head * tl.num_programs(1) + part) * rows + row
    tl.store(marks_at + slot * 2, most, mask=row < rows)
    tl.store(marks_at + slot * 2 + 1, total, mask=row < rows)


@triton.jit(do_not_specialize=["Hkv", "T", "W", "G"])
def _add_up(
    queries_at, keys_at, pads_at, highest_at, shares_at, votes_at,
    Hkv, T, W, per_batch, per_head, per_token, scaling, softcap, G,
    REDUCE: tl.constexpr,
    CAPPED: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
    KEYS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What one block of the prefix receives from the window of every query head of its group."""
    head = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    across, prefix = tl.arange(0, D_BLOCK), T - W
    first = 0
    if PADDED:
        first = tl.load(pads_at + head // Hkv)
    start = keys_at + head // Hkv * per_batch + head % Hkv * per_head
    reduced = tl.zeros((KEYS,), tl.float32)
    for member in range(0, G):
        votes = tl.zeros((KEYS,), tl.float32)
        for begin in range(0, W, TILE):
            row = begin + tl.arange(0, TILE)
            slot = (head * G + member) * W + row
            queries = tl.load(
                queries_at + slot[:, None] * D + across[None, :],
                mask=(row < W)[:, None] & (across < D)[None, :],
                other=0.0,
            )
            scores = _scores(
                queries, start + place.to(tl.int64) * per_token, place, row, W, prefix + row,
                first, scaling, softcap, T, CAPPED, PADDED, D, D_BLOCK,
            )  # fmt: skip
            highest = tl.load(highest_at + slot, mask=row < W, other=0.0)
            shares = tl.load(shares_at + slot, mask=row < W, other=0.0)
            votes += tl.sum(tl.exp(scores - highest[:, None]) * shares[:, None], axis=0)
        if REDUCE == "none":
            tl.store(votes_at + (head * G + member) * prefix + place, votes, mask=place < prefix)
        elif REDUCE == "max":
            reduced = tl.maximum(reduced, votes)
        else:
            reduced += votes
    if REDUCE == "mean":
        reduced = reduced / G
    if REDUCE != "none":
        tl.store(votes_at + head * prefix + place, reduced, mask=place < prefix)


@triton.jit(do_not_specialize=["P"])
def _pool(
    votes_at, pooled_at, P, KERNEL: tl.constexpr, MAX: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One block of one head's votes, each with its neighbours."""
    start = tl.program_id(0).to(tl.int64) * P
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    outside = float("-inf") if MAX else 0.0
    pooled = tl.full((BLOCK,), outside, tl.float32)
    for offset in range(-(KERNEL // 2), KERNEL // 2 + 1):
        near = place + offset
        votes = tl.load(votes_at + start + near, mask=(near >= 0) & (near < P), other=outside)
        if MAX:
            pooled = tl.maximum(pooled, votes)
        else:
            pooled += votes
    if not MAX:
        pooled = pooled / KERNEL
    tl.store(pooled_at + start + place, pooled, mask=place < P)


@triton.jit(do_not_specialize=["heads", "repeats", "K"])
def _gather(
    states_at, indices_at, kept_at, heads, repeats, K,
    per_batch, per_head, per_token, index_batch, index_head, index_token,
    D: tl.constexpr, D_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some of the rows that one head keeps."""
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    row, across = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, D_BLOCK)
    indices = indices_at + batch * index_batch + head * index_head + row * index_token
    token = tl.maximum(tl.load(indices, mask=row < K, other=0).to(tl.int64), 0)
    start = states_at + batch * per_batch + head // repeats * per_head
    inside = (row < K)[:, None] & (across < D)[None, :]
    found = tl.load(start + token[:, None] * per_token + across[None, :], mask=inside)
    slot = (tl.program_id(0).to(tl.int64) * K + row)[:, None] * D
    tl.store(kept_at + slot + across[None, :], found, mask=inside)
