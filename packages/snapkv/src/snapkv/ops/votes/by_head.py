"""Votes of states in half precision, a few KV heads at a time, in as few passes as possible.

Products of numbers in half precision are exact in float32, and they are summed in float32; scores
are scaled after the highest has been subtracted. Exponentials are in base two, and one matrix
product computes the shares of the softmax, the sum over the window and that over a group. So the
votes are those of `snapkv.ops.votes.blocked` except for the rounding of exponentials. The axes are
those of `snapkv.ops.votes.reference`.
"""

import math

import torch
from torch import Tensor

from snapkv.ops.scores import AttentionStates
from snapkv.ops.votes import blocked
from snapkv.ops.votes.reference import reduce_group

MOST_BYTES = 8 << 20
"""The most bytes of scores at a time; more would leave the processor's caches between two
passes."""

MOST_BYTES_OF_A_HEAD = 64 << 20
"""The most bytes of scores of one KV head; longer ones are computed in blocks of keys."""

_LOG2_E = math.log2(math.e)


def window_votes(states: AttentionStates, *, group_reduce: str = "none") -> Tensor:
    """Compute the votes of the window for a few heads at a time, in half precision.

    The arguments are those of `snapkv.ops.window_votes`.

    Returns:
        (B, Hkv, P) float32; (B, Hq, P) for "none". The votes are those of
        `snapkv.ops.votes.reference.window_votes` up to rounding.
    """
    (B, Hq, W, D), (Hkv, T) = states.queries.shape, states.keys.shape[1:3]
    N, G = B * Hkv, Hq // Hkv
    of_a_head = 4 * G * W * T
    if not 0 < of_a_head <= MOST_BYTES_OF_A_HEAD:
        return blocked.window_votes(states, group_reduce=group_reduce)
    options, pad_tokens = states.score_options, states.pad_tokens
    softcap, slope = options.softcap, options.scaling * _LOG2_E
    if softcap is not None:
        slope = softcap * _LOG2_E
    sinks = options.sink_logits
    if sinks is not None:
        sinks = sinks.float().mul(_LOG2_E / slope).view(1, Hq, 1).expand(B, Hq, W)
        sinks = sinks.reshape(N, G * W, 1)
    pads = None if pad_tokens is None else pad_tokens.repeat_interleave(Hkv)
    rows, stored = states.queries.float().reshape(N, G * W, D), states.keys.flatten(0, 1)
    apart = G if group_reduce in ("none", "max") else 1
    votes = rows.new_empty((N, apart, T - W), dtype=torch.float32)
    at_once = max(1, MOST_BYTES // of_a_head)
    for start in range(0, N, at_once):
        some = slice(start, start + at_once)
        scores = rows[some] @ stored[some].float().mT
        if softcap is not None:
            scores.mul_(options.scaling / softcap).tanh_()
        own = None if pads is None else pads[some]
        blocked.hide_unseen(scores.view(len(scores), -1, W, T), 0, T, own)
        shares = _shares(scores, slope, own, None if sinks is None else sinks[some])
        by_part = scores.view(len(scores), apart, -1, T)[..., : T - W]
        votes[some] = (shares.view(len(scores), apart, 1, -1) @ by_part).squeeze(2)
        del scores, by_part  # free them before the next ones
    if group_reduce == "mean":
        votes /= G
    votes = votes.view(B, Hkv * apart, T - W)
    return reduce_group(votes, Hkv, "max") if group_reduce == "max" else votes


def _shares(scores: Tensor, slope: float, pads: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Compute the exponentials of the scores in place, and return the factor of each row.

    Args:
        scores: (N, G * W, T), changed in place.
        slope: factor on the scores before they are exponents of two.
        pads: (N,) leading padding, or None.
        sinks: (N, G * W, 1) sink logits, or None.

    Returns:
        (N, G * W, 1), one over the sum of each row's exponentials.
    """
    highest = scores.amax(dim=-1, keepdim=True)
    if sinks is not None:
        highest = highest.maximum(sinks)
    shift = blocked.finite(highest, pads)
    total = scores.sub_(shift).mul_(slope).exp2_().sum(dim=-1, keepdim=True)
    if sinks is not None:
        total += (sinks - shift).mul_(slope).exp2_()
    return total.masked_fill_(total == 0, 1.0).reciprocal_()
