"""What the studies measure of one layer: who is voted for, who is attended to, and the overlap.

Axes as in `snapkv.ops`: Hq query heads, P positions before a window, N copied tokens; one row of a
batch.
"""

from collections.abc import Iterator, Sequence
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
    """Which of the first tokens a policy keeps, seen from every query head (Eq. 4 and 5).

    Returns:
        (Hq, tokens) bool.
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
    """How often each position is important to a query, and how often it was selected too.

    A position is important where a query's attention to it is above the threshold (Eq. 6); it is
    hit where it is selected as well (Eq. 7). Counts are over the queries of [start, stop).

    Returns:
        important (P,) and hit (N, P), int64, summed over heads and queries.
    """
    times = torch.zeros(masks.shape[1:], dtype=torch.int64, device=masks.device)
    for weights in _blocks(layer, start, stop, masks.shape[-1]):
        times += (weights > threshold).sum(dim=1)
    return times.sum(dim=0), (times * masks).sum(dim=1)


def mean_attention(layer: PromptLayer, start: int, stop: int, tokens: int) -> Tensor:
    """Attention that the queries of [start, stop) pay the first tokens, averaged over them.

    Returns:
        (Hq, tokens) float32; zero for tokens behind the queries.
    """
    part = between(layer, start, stop)
    received = ops.attention_received(
        part.queries, part.keys, part.score_options, block_tokens=_BLOCK_TOKENS
    )[0, :, :tokens]
    behind = tokens - received.shape[-1]
    return torch.nn.functional.pad(received, (0, behind)) / (stop - start)


def attention_of_halves(layer: PromptLayer, start: int, stop: int, tokens: int) -> Tensor:
    """Attention that every other query of [start, stop) pays the first tokens, and the rest.

    Returns:
        (2, Hq, tokens) float32, summed over the queries of each half.
    """
    halves = [
        torch.stack([weights[:, ::2].sum(dim=1), weights[:, 1::2].sum(dim=1)])
        for weights in _blocks(layer, start, stop, tokens)
    ]
    return torch.stack(halves).sum(dim=0)


def _blocks(layer: PromptLayer, start: int, stop: int, tokens: int) -> Iterator[Tensor]:
    """Attention of the queries of [start, stop) onto the first tokens, some queries at a time.

    Yields:
        (Hq, up to 64, tokens) float32.
    """
    for block in range(start, stop, _BLOCK_TOKENS):
        part = between(layer, block, min(block + _BLOCK_TOKENS, stop))
        weights = ops.attention_weights(part.queries, part.keys, part.score_options)
        yield weights[0, :, :, :tokens]


def best(attention: Tensor, keep_tokens: int) -> Tensor:
    """The most attended positions of every head (Eq. 3): (Hq, P) bool; ties go to the lower."""
    kept = ops.keep_best(attention[None], [keep_tokens])[0]
    return torch.zeros_like(attention, dtype=torch.bool).scatter_(1, kept, True)


def overlap(one: Tensor, other: Tensor) -> float:
    """H(one, other) of Eq. 8: which part of the positions in one set is in the other."""
    return float((one & other).sum() / one.sum())


def votes_around(votes: Tensor, start: int, reach: int) -> Tensor:
    """Which part of its votes a head gives every distance from a position.

    Returns:
        (Hq, 2 * reach + 1) float32, the position itself in the middle; zero outside the prefix.
    """
    shares = votes / votes.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(votes.dtype).tiny)
    around = torch.nn.functional.pad(shares, (reach, reach))
    return around[:, start : start + 2 * reach + 1]


def base_share(votes: Tensor, start: int, reach: int, sink_tokens: int) -> Tensor:
    """The mean part of its votes that a head gives a position elsewhere: (Hq,) float32.

    Elsewhere is further than `reach` from the position, and behind the first `sink_tokens`.
    """
    elsewhere = torch.ones(votes.shape[-1], dtype=torch.bool, device=votes.device)
    elsewhere[:sink_tokens] = False
    elsewhere[max(0, start - reach) : start + reach + 1] = False
    total = votes.sum(dim=-1).clamp(min=torch.finfo(votes.dtype).tiny)
    return votes[:, elsewhere].sum(dim=-1) / total / elsewhere.sum().clamp(min=1)


def distances_to_voted(voted: Tensor, places: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """How far positions stand before the nearest one that is voted for, and how far behind it.

    Returns:
        Two of (Hq, N) int64.
    """
    apart = places[:, None] - torch.arange(voted.shape[-1], device=voted.device)
    far = reach + 1

    def nearest(distance: Tensor) -> Tensor:
        usable = voted[:, None] & (distance >= 0) & (distance < far)
        return torch.where(usable, distance, far).amin(dim=-1)

    return nearest(-apart), nearest(apart)


def smallest_pair(counts: Tensor, share: float) -> tuple[int, int, float] | None:
    """The narrowest pair (before, behind) within which a share of positions has a vote.

    Positions without one anywhere within reach do not count: no pooling would keep them.

    Returns:
        before, behind, and the share that is reached; of two as narrow the one that reaches less
        far before. None where no pair does, or nothing was counted.
    """
    counts = counts.clone()
    counts[-1, -1] = 0
    total = counts.sum()
    missed = counts.flip(0, 1).cumsum(0).cumsum(1).flip(0, 1)[1:, 1:]
    covered = 1 - missed / total.clamp(min=1)
    within = (covered >= share).nonzero().tolist() if total else []
    if not within:
        return None
    before, behind = min(within, key=lambda pair: (sum(pair), pair[0]))
    return before, behind, float(covered[before, behind])


def quantile(shares: Sequence[float], distances: Sequence[int], part: float) -> int | None:
    """The distance up to which that part of the shares lies; None where there are none."""
    wanted, reached = part * sum(shares), 0.0
    for share, distance in zip(shares, distances, strict=True):
        reached += share
        if reached >= wanted > 0:
            return distance
    return None
