"""The largest vote of a window's queries, computed for a few KV heads at a time.

The weights of every query are pooled by themselves, so those of a few heads or queries are held at
once and changed in place. Positions are rows and queries are columns: pooling then takes one
position of all queries, which are neighbours in memory, at a step. The axes are those of
`snapkv.ops.votes.reference`; N heads and Q queries of each of their query heads are a block, R = G
* Q.
"""

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from snapkv.ops.scores import AttentionStates, ScoreOptions
from snapkv.ops.votes.reference import CHUNK, LEAST_SUM, Lift, reduce_group

MOST_BYTES = 8 << 20
"""The most bytes of weights at a time, unless one query of a KV head has more."""

_LOG2_E = math.log2(math.e)


@torch.no_grad()
def largest_votes(
    states: AttentionStates,
    lift: Lift,
    *,
    prefix_tokens: int,
    sink_tokens: int = 0,
    group_reduce: str = "none",
) -> tuple[Tensor, Tensor]:
    """Compute the largest vote on each position for a few heads or queries at a time.

    The arguments are those of `snapkv.ops.largest_votes`.

    Returns:
        The largest votes and the sums of unpooled weights, both (B, Hkv, P) float32; (B, Hq, P) for
        "none". They are those of `snapkv.ops.votes.reference.largest_votes` up to rounding.
    """
    queries, keys, pad_tokens = states.queries, states.keys, states.pad_tokens
    (B, Hq, W, _), (Hkv, T) = queries.shape, keys.shape[1:3]
    G, sinks = Hq // Hkv, states.score_options.sink_logits
    grouped = queries.view(B, Hkv, G, W, -1)
    apart = 1 if group_reduce == "max" else G  # "max" needs no largest vote of each query head
    largest = queries.new_zeros((B, Hkv, apart, prefix_tokens), dtype=torch.float32)
    summed = queries.new_zeros((B, Hkv, G, prefix_tokens), dtype=torch.float32)
    for row, pads in enumerate([0] * B if pad_tokens is None else pad_tokens.tolist()):
        own, prefix = T - pads, prefix_tokens - pads
        if prefix <= 0:
            continue
        fill = -prefix % CHUNK
        for heads, some in _blocks(Hkv, range(max(0, W - own), W), 4 * G * own):
            weights, shares = _exponentials(
                grouped[row, heads, :, some],
                keys[row, heads, pads:],
                states.score_options,
                None if sinks is None else sinks.view(Hkv, G)[heads],
                fill,
                some.start + own - W,
            )
            received = weights[:, : fill + prefix]
            _add_votes(summed[row, heads, :, pads:], received[:, fill:], shares)
            lifted = _lifted(received, shares.flatten(1), lift, fill, sink_tokens)
            of_block = lifted.reshape(*lifted.shape[:2], apart, -1).amax(dim=-1).mT
            into = largest[row, heads, :, pads:]
            torch.maximum(into, of_block, out=into)
    reduced = "none" if group_reduce == "max" else group_reduce  # "max" is already reduced
    return (
        reduce_group(largest.flatten(1, 2), Hkv, reduced),
        reduce_group(summed.flatten(1, 2), Hkv, group_reduce),
    )


def _blocks(heads: int, queries: range, bytes_of_a_query: int) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of heads and queries that are small enough to fit into memory.

    Args:
        heads: how many heads there are.
        queries: the queries to divide.
        bytes_of_a_query: bytes of the weights of one query; a block takes at most `MOST_BYTES`.
    """
    most = max(1, MOST_BYTES // bytes_of_a_query)
    for first in range(0, heads, step := max(1, most // len(queries))):
        for start in queries[::most]:
            yield slice(first, first + step), slice(start, min(start + most, queries.stop))


def _exponentials(
    queries: Tensor,
    keys: Tensor,
    score_options: ScoreOptions,
    sinks: Tensor | None,
    fill: int,
    first_voter: int,
) -> tuple[Tensor, Tensor]:
    """Compute the attention weights of some queries before they are normalised.

    Args:
        queries: (N, G, Q, D).
        keys: (N, T, D).
        score_options: how scores are computed.
        sinks: (N, G) sink logits, or None.
        fill: how many zeros to put before the weights.
        first_voter: the position of the first query.

    Returns:
        Weights before they are divided by their sum, (N, fill + T, R); and one over that sum, (N,
        G, Q).
    """
    (N, G, Q, _), T = queries.shape, keys.shape[1]
    softcap, slope = score_options.softcap, score_options.scaling
    rows = queries.float().mul(slope if softcap is not None else slope * _LOG2_E).flatten(1, 2)
    scores = rows.new_empty(N, fill + T, G * Q)
    torch.bmm(keys.float(), rows.mT, out=scores[:, fill:])
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap * _LOG2_E)
    scores[:, :fill] = -math.inf
    ahead = torch.ones(T - first_voter, Q, dtype=torch.bool, device=keys.device).tril_(-1)
    seen = scores.view(N, -1, G, Q)[:, fill + first_voter :]
    seen.masked_fill_(ahead[:, None], -math.inf)
    highest = scores.amax(dim=1, keepdim=True)
    if sinks is not None:
        sinks = sinks.float().mul(_LOG2_E).repeat_interleave(Q, dim=-1)[:, None]
        highest = highest.maximum(sinks)
    total = scores.sub_(highest).exp2_().sum(dim=1, keepdim=True)
    if sinks is not None:
        total += (sinks - highest).exp2_()
    return scores, total.reciprocal_().view(N, G, Q)


def _add_votes(votes: Tensor, weights: Tensor, shares: Tensor) -> None:
    """Add the attention weights of each query to the votes of its head, in place.

    Args:
        votes: (N, G, P), changed in place.
        weights: (N, P, R) unnormalised.
        shares: (N, G, Q), the factor of each query.
    """
    queries = shares.shape[2]
    for head, member in itertools.product(range(shares.shape[0]), range(shares.shape[1])):
        own = weights[head, :, member * queries : (member + 1) * queries]
        votes[head, member].addmv_(own, shares[head, member])


def _lifted(weights: Tensor, shares: Tensor, lift: Lift, fill: int, sink_tokens: int) -> Tensor:
    """Pool the attention weights of each query, and keep the sum of the weights the same.

    The weights of sinks are not pooled. Changes `weights`.

    Args:
        weights: (N, fill + P, R) unnormalised, changed in place.
        shares: (N, R), the factor of each query.
        lift: how to pool.
        fill: how many zeros are before the weights.
        sink_tokens: how many first positions are sinks.

    Returns:
        (N, P, R) float32.
    """
    first = fill + sink_tokens
    of_sinks = weights[:, fill:first] * shares[:, None]
    weights[:, fill:first] = 0.0
    own = weights.sum(dim=1, keepdim=True)
    lifted = lift.pool_rows(weights)
    lifted[:, :first] = 0.0
    lifted *= own * shares[:, None] / lifted.sum(dim=1, keepdim=True).clamp_(min=LEAST_SUM)
    lifted[:, fill:first] = of_sinks
    return lifted[:, fill:]
