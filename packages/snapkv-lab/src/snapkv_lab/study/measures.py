"""What the studies measure of one layer: who is voted for, who is attended to, and the overlap.

Axes as in `snapkv.ops`: Hq query heads, P positions before a window; one row of a batch.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from snapkv import ops
from snapkv.policies import Policy, PromptLayer

_BLOCK_TOKENS = 64
"""Queries whose attention over all keys is held at a time."""


def between(layer: PromptLayer, start: int, stop: int) -> PromptLayer:
    """The layer as it was when `stop` tokens had been read, with the queries from `start` on."""
    first = layer.keys.shape[2] - layer.queries.shape[2]
    assert first <= start < stop <= layer.keys.shape[2]
    return replace(
        layer,
        queries=layer.queries[:, :, start - first : stop - first],
        keys=layer.keys[:, :, :stop],
        values=layer.values[:, :, :stop],
    )


def selected(policy: Policy, layer: PromptLayer, tokens: int) -> Tensor:
    """(Hq, tokens) bool: which of the first tokens a policy keeps for a query head (Eq. 4, 5)."""
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
    """(P,) and (N, P) int64: how often positions are important, and how often selected too.

    A position is important where a query's attention to it is above the threshold (Eq. 6); it is
    hit where it is selected as well (Eq. 7). Sums over heads and the queries of [start, stop).
    """
    times = torch.zeros(masks.shape[1:], dtype=torch.int64, device=masks.device)
    for weights in _blocks(layer, start, stop, masks.shape[-1]):
        times += (weights > threshold).sum(dim=1)
    return times.sum(dim=0), (times * masks).sum(dim=1)


def mean_attention(layer: PromptLayer, start: int, stop: int, tokens: int) -> Tensor:
    """(Hq, tokens) float32: mean attention of the queries of [start, stop) to the first tokens.

    Zero for tokens after the queries.
    """
    part = between(layer, start, stop)
    received = ops.attention_received(part, block_tokens=_BLOCK_TOKENS)[0, :, :tokens]
    behind = tokens - received.shape[-1]
    return torch.nn.functional.pad(received, (0, behind)) / (stop - start)


def attention_of_halves(layer: PromptLayer, start: int, stop: int, tokens: int) -> Tensor:
    """(2, Hq, tokens) float32: attention of every other query of [start, stop), and of the rest."""
    halves = [
        torch.stack([weights[:, ::2].sum(dim=1), weights[:, 1::2].sum(dim=1)])
        for weights in _blocks(layer, start, stop, tokens)
    ]
    return torch.stack(halves).sum(dim=0)


def _blocks(layer: PromptLayer, start: int, stop: int, tokens: int) -> Iterator[Tensor]:
    """(Hq, up to 64, tokens) float32: attention of some queries of [start, stop) at a time."""
    for block in range(start, stop, _BLOCK_TOKENS):
        part = between(layer, block, min(block + _BLOCK_TOKENS, stop))
        weights = ops.attention_weights(part)
        yield weights[0, :, :, :tokens]


def best(attention: Tensor, keep_tokens: int) -> Tensor:
    """The most attended positions of every head (Eq. 3): (Hq, P) bool; ties go to the lower."""
    kept = ops.keep_best(attention[None], [keep_tokens])[0]
    return torch.zeros_like(attention, dtype=torch.bool).scatter_(1, kept, True)


def overlap(one: Tensor, other: Tensor) -> float:
    """H(one, other) of Eq. 8: which part of the positions in one set is in the other."""
    return float((one & other).sum() / one.sum())
