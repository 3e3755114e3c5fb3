"""Votes in bounded memory: the keys are read twice, block by block.

The reference holds the scores of every query head, window query and prompt position at once, and a
float32 copy of all keys. Here there is only a block of either: the first pass finds the softmax's
normaliser of every row, the second the weights. Axes as in `snapkv.ops.reference`.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from snapkv.ops.reference import reduce_group

BLOCK_TOKENS = 8192
"""Keys at a time; prompts no longer than that are voted on by the reference."""


def window_votes(
    queries: Tensor,
    keys: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    pad_tokens: Tensor | None = None,
    group_reduce: str = "none",
    block_tokens: int = BLOCK_TOKENS,
) -> Tensor:
    """As `snapkv.ops.reference.window_votes`, up to rounding."""
    B, Hq, W, _ = queries.shape
    prefix_tokens = keys.shape[2] - W
    blocks = functools.partial(
        _score_blocks, queries, keys, block_tokens, scaling, softcap, pad_tokens
    )
    total = queries.new_full((B, Hq, W, 1), float("-inf"), dtype=torch.float32)
    if sinks is not None:
        total = torch.maximum(total, sinks.float().view(1, Hq, 1, 1))
    for _, scores in blocks(keys.shape[2]):
        total = torch.logaddexp(total, scores.logsumexp(dim=-1, keepdim=True))
    total = total.masked_fill(total.isneginf(), 0.0)  # the row of a pad, which sees nothing
    heads = Hq if group_reduce == "none" else keys.shape[1]
    votes = queries.new_empty((B, heads, prefix_tokens), dtype=torch.float32)
    for start, scores in blocks(prefix_tokens):
        received = scores.sub_(total).exp_().sum(dim=-2)
        votes[..., start : start + scores.shape[-1]] = reduce_group(
            received, keys.shape[1], group_reduce
        )
    return votes


def _score_blocks(
    queries: Tensor,
    keys: Tensor,
    block_tokens: int,
    scaling: float,
    softcap: float | None,
    pad_tokens: Tensor | None,
    columns: int,
) -> Iterator[tuple[int, Tensor]]:
    """Blocks of the first columns: where each begins and its scores, (B, Hq, W, N) float32."""
    B, Hq, W, D = queries.shape
    Hkv, T = keys.shape[1], keys.shape[2]
    grouped = queries.float().reshape(B, Hkv, (Hq // Hkv) * W, D)
    own = torch.arange(T - W, T, device=keys.device)[:, None]
    for start in range(0, columns, block_tokens):
        stop = min(start + block_tokens, columns)
        block = keys[:, :, start:stop].float()
        scores = (grouped @ block.transpose(-1, -2)).view(B, Hq, W, -1).mul_(scaling)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(start, stop, device=keys.device)
        hidden = (position > own)[None, None]
        if pad_tokens is not None:
            hidden = hidden | (position < pad_tokens[:, None, None, None])
        yield start, scores.masked_fill_(hidden, float("-inf"))
