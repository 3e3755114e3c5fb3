"""The operations in torch as they run on a CPU: in bounded memory, in few passes.

The reference holds the scores of every query head, window query and prompt position at once, its
their softmax, and a float32 copy of all keys. Here there is only a block of each, which is
changed in place: the first pass finds the highest score of every row and the sum of exponentials,
the second adds up the weights. Axes as in `snapkv.ops.votes.reference`.
"""

import torch
from torch import Tensor

from snapkv.ops.scores import ScoreOptions
from snapkv.ops.votes import reference
from snapkv.ops.votes.reference import reduce_group

BLOCK_TOKENS = 8192
"""Keys at a time."""


def window_votes(
    queries: Tensor,
    keys: Tensor,
    score_options: ScoreOptions,
    *,
    pad_tokens: Tensor | None = None,
    group_reduce: str = "none",
    block_tokens: int = BLOCK_TOKENS,
) -> Tensor:
    """As `snapkv.ops.votes.reference.window_votes`, up to rounding."""
    softcap, sinks = score_options.softcap, score_options.sink_logits
    B, Hq, W, D = queries.shape
    Hkv, T = keys.shape[1], keys.shape[2]
    grouped = queries.float().mul(score_options.scaling).reshape(B, Hkv, (Hq // Hkv) * W, D)

    def scores_of(start: int, stop: int) -> Tensor:
        scores = (grouped @ keys[:, :, start:stop].float().transpose(-1, -2)).view(B, Hq, W, -1)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        return hide_unseen(scores, start, T, pad_tokens)

    highest = queries.new_full((B, Hq, W, 1), float("-inf"), dtype=torch.float32)
    total = torch.zeros_like(highest)
    if sinks is not None:
        highest, total = highest.maximum(sinks.float().view(1, Hq, 1, 1)), total + 1
    whole = scores_of(0, T) if block_tokens >= T else None  # exponentials after the first pass
    for start in range(0, T, block_tokens):
        scores = scores_of(start, min(start + block_tokens, T)) if whole is None else whole
        highest, total = _add_block(scores, highest, total)
        del scores
    shares = total.masked_fill(total == 0, 1.0).reciprocal_().transpose(-1, -2)
    heads = Hq if group_reduce == "none" else Hkv
    votes = queries.new_empty((B, heads, T - W), dtype=torch.float32)
    for start in range(0, T - W, block_tokens):
        stop = min(start + block_tokens, T - W)
        if whole is None:
            received = shares @ scores_of(start, stop).sub_(finite(highest)).exp_()
        else:
            received = shares @ whole[..., :stop]
        received = received.squeeze(-2)
        votes[..., start:stop] = reduce_group(received, Hkv, group_reduce)
    return votes


def _add_block(scores: Tensor, highest: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Highest score and sum of exponentials of every row, a block later.

    Turns the block's scores into exponentials.
    """
    higher = torch.maximum(scores.amax(dim=-1, keepdim=True), highest)
    shift = finite(higher)
    of_block = scores.sub_(shift).exp_().sum(dim=-1, keepdim=True)
    return higher, total * (highest - shift).exp_() + of_block


def finite(highest: Tensor) -> Tensor:
    """What is subtracted before the exponential; rows that have seen nothing stay at zero."""
    return highest.masked_fill(highest.isneginf(), 0.0)


def hide_unseen(scores: Tensor, start: int, tokens: int, pad_tokens: Tensor | None) -> Tensor:
    """Put minus infinity where a query of the window comes before a key, and at pads."""
    W, stop = scores.shape[2], start + scores.shape[3]
    first = max(start, tokens - W)  # before it, the whole window sees every token
    if first < stop:
        own = torch.arange(tokens - W, tokens, device=scores.device)[:, None]
        ahead = torch.arange(first, stop, device=scores.device) > own
        scores[..., first - start :].masked_fill_(ahead, float("-inf"))
    if pad_tokens is not None:
        slots = torch.arange(start, stop, device=scores.device)
        pads = slots < pad_tokens[:, None, None, None]
        scores.masked_fill_(pads, float("-inf"))
    return scores


def fade_votes(votes: Tensor, decay: float) -> Tensor:
    """As `snapkv.ops.votes.reference.fade_votes`, up to rounding, in steps that double.

    After a step of width n, every position has what the n before it carry on to it. Where the
    factor has left float32, no vote reaches further.
    """
    least = torch.finfo(torch.float32).tiny
    faded, width, factor = votes, 1, 1.0
    while width < votes.shape[-1] and factor > least:
        factor = max(decay**width, least)
        lifted = torch.maximum(faded[..., width:], faded[..., :-width] * factor)
        faded, width = torch.cat([faded[..., :width], lifted], dim=-1), 2 * width
    return faded


def gather_tokens(states: Tensor, keep_indices: Tensor) -> Tensor:
    """As `snapkv.ops.votes.reference.gather_tokens`, one index and one copy for every token."""
    if not states.is_contiguous():  # to make them so would copy what is dropped, too
        return reference.gather_tokens(states, keep_indices)
    B, Hs, T, D = states.shape
    heads, K = max(keep_indices.shape[1], Hs), keep_indices.shape[2]
    stored = torch.arange(B * heads, device=states.device).view(B, heads, 1) // (heads // Hs)
    kept = keep_indices.clamp(min=0) + stored * T
    return states.view(-1, D).index_select(0, kept.flatten()).view(B, heads, K, D)
