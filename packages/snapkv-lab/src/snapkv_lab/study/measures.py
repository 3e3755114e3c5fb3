"""Measurements of one layer: which positions are voted for, which are attended to, and the overlap.

The axes are those of `snapkv.ops`: Hq query heads, and P positions before a window. The batch has
one row.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from snapkv import ops
from snapkv.policies import Policy, PromptLayer

_BLOCK_TOKENS = 64
"""The number of queries whose attention over all keys is held at a time."""


def layer_between(layer: PromptLayer, start: int, stop: int) -> PromptLayer:
    """Return the layer as it is after the first `stop` tokens, with the queries from `start` on.

    Keys and values are those of all `stop` tokens. The tensors are views of the layer's own.

    Args:
        layer: the layer, which must have the queries of these positions.
        start: the position of the first query in the text.
        stop: the position after the last query.
    """
    first = layer.keys.shape[2] - layer.queries.shape[2]
    assert first <= start < stop <= layer.keys.shape[2]
    return replace(
        layer,
        queries=layer.queries[:, :, start - first : stop - first],
        keys=layer.keys[:, :, :stop],
        values=layer.values[:, :, :stop],
    )


def selected_mask(policy: Policy, layer: PromptLayer, tokens: int) -> Tensor:
    """Return which of the first positions the policy keeps for each query head (Eq. 4, 5).

    Args:
        policy: the policy; if it keeps all tokens, all positions are True.
        layer: the layer at the end of the prompt.
        tokens: the number of first positions to return.

    Returns:
        (Hq, tokens) bool. Query heads that share a KV head have equal rows if the policy selects
        per KV head.
    """
    heads = layer.queries.shape[1]
    selection = policy.select(layer)
    if selection is None:
        return torch.ones(heads, tokens, dtype=torch.bool, device=layer.keys.device)
    kept = selection.keep_indices[0]
    mask = torch.zeros(kept.shape[0], selection.prompt_tokens, dtype=torch.bool, device=kept.device)
    mask.scatter_(1, kept, True)
    return mask[:, :tokens].repeat_interleave(heads // kept.shape[0], dim=0)


def important_and_hit(
    layer: PromptLayer, masks: Tensor, *, start: int, stop: int, threshold: float
) -> tuple[Tensor, Tensor]:
    """Count how often positions are important, and how often they are also selected.

    A position is important if a query's attention to it is above the threshold (Eq. 6). It is a hit
    if it is selected as well (Eq. 7). The counts are sums over the query heads and over the queries
    of [start, stop).

    Args:
        layer: the layer; it must have the queries of these positions.
        masks: (N, Hq, P) bool, N selections from the first P positions.
        start: the position of the first query in the text.
        stop: the position after the last query.
        threshold: the attention above which a position is important.

    Returns:
        How often each position is important, (P,) int64, and how often it is also in each
        selection, (N, P) int64.
    """
    times = torch.zeros(masks.shape[1:], dtype=torch.int64, device=masks.device)
    for weights in _blocks(layer, start, stop, masks.shape[-1]):
        times += (weights > threshold).sum(dim=1)
    return times.sum(dim=0), (times * masks).sum(dim=1)


def mean_attention(layer: PromptLayer, start: int, stop: int, tokens: int) -> Tensor:
    """Return the mean attention of the queries in [start, stop) to each of the first `tokens`
    tokens.

    Args:
        layer: the layer, which must have the queries of these positions.
        start: the position of the first query in the text.
        stop: the position after the last query.
        tokens: the number of first tokens in the result.

    Returns:
        (Hq, tokens) float32, with zeros for tokens from `stop` on.
    """
    part = layer_between(layer, start, stop)
    received = ops.attention_received(part, block_tokens=_BLOCK_TOKENS)[0, :, :tokens]
    padding = tokens - received.shape[-1]
    return torch.nn.functional.pad(received, (0, padding)) / (stop - start)


def attention_of_halves(layer: PromptLayer, start: int, stop: int, tokens: int) -> Tensor:
    """Return the sum of the attention of every other query in [start, stop), and the sum of the
    rest.

    Args:
        layer: the layer, which must have the queries of these positions.
        start: the position of the first query in the text.
        stop: the position after the last query.
        tokens: the number of first tokens in the result, at most `start`.

    Returns:
        (2, Hq, tokens) float32: from the queries at even places after `start`, and at odd places.
    """
    halves = [
        torch.stack([weights[:, ::2].sum(dim=1), weights[:, 1::2].sum(dim=1)])
        for weights in _blocks(layer, start, stop, tokens)
    ]
    return torch.stack(halves).sum(dim=0)


def _blocks(layer: PromptLayer, start: int, stop: int, tokens: int) -> Iterator[Tensor]:
    """Yield the attention weights of the queries in [start, stop) to the first `tokens` tokens, a
    few queries at a time.

    Each block is (Hq, up to 64 queries, tokens). The layer must have the queries of these
    positions.
    """
    for block in range(start, stop, _BLOCK_TOKENS):
        part = layer_between(layer, block, min(block + _BLOCK_TOKENS, stop))
        weights = ops.attention_weights(part)
        yield weights[0, :, :, :tokens]


def most_attended(attention: Tensor, keep_tokens: int) -> Tensor:
    """Return a mask that marks the positions that receive the most attention in each head (Eq. 3).
    Of equal positions the lower one wins.

    Args:
        attention: (Hq, P), the attention to P positions.
        keep_tokens: how many positions are selected for each head, at most P.

    Returns:
        (Hq, P) bool.
    """
    kept = ops.keep_best(attention[None], [keep_tokens])[0]
    return torch.zeros_like(attention, dtype=torch.bool).scatter_(1, kept, True)


def overlap_share(one: Tensor, other: Tensor) -> float:
    """Return the fraction of the positions in the first set that are also in the second (Eq. 8).

    Both are masks of the same shape, and the positions of all heads are counted together. The first
    set must not be empty.
    """
    return float((one & other).sum() / one.sum())
