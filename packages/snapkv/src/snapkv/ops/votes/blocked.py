"""The operations in torch for a CPU: in bounded memory and in few passes.

The reference holds the scores of every query head, window query and prompt position at once, their
softmax, and a float32 copy of all keys. This module holds one block of each at a time, which is
changed in place: the first pass finds the highest score of every row and the sum of exponentials,
the second adds up the weights. The axes are those of `snapkv.ops.votes.reference`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from snapkv.ops.scores import AttentionStates
from snapkv.ops.votes import reference
from snapkv.ops.votes.reference import reduce_group

BLOCK_TOKENS = 8192
"""How many keys are scored at a time."""


def window_votes(
    states: AttentionStates, *, group_reduce: str = "none", block_tokens: int = BLOCK_TOKENS
) -> Tensor:
    """Compute the votes of the window in blocks of keys, to limit the memory that is needed.

    The result is that of `snapkv.ops.votes.reference.window_votes` up to rounding.

    Args:
        states: the last W queries of the prompt and all T keys of it.
        group_reduce: how the query heads of a KV head are combined, as in `reduce_group`.
        block_tokens: how many keys are scored at a time.

    Returns:
        (B, Hkv, P) float32; (B, Hq, P) for "none".
    """
    keys, pad_tokens, options = states.keys, states.pad_tokens, states.score_options
    softcap, sinks = options.softcap, options.sink_logits
    (B, Hq, W, D), (Hkv, T) = states.queries.shape, keys.shape[1:3]
    grouped = states.queries.float().mul(options.scaling).reshape(B, Hkv, (Hq // Hkv) * W, D)

    def scores_of(start: int, stop: int) -> Tensor:
        scores = (grouped @ keys[:, :, start:stop].float().transpose(-1, -2)).view(B, Hq, W, -1)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        return hide_unseen(scores, start, T, pad_tokens)

    # The highest score so far, and the sum of exponentials; they start with a sink's.
    before = None if sinks is None else sinks.float().view(1, Hq, 1, 1)
    carried: Tensor | float = 1.0
    for start in range(0, T, block_tokens):
        scores = scores_of(start, min(start + block_tokens, T))
        highest = scores.amax(dim=-1, keepdim=True)
        if before is not None:
            highest = torch.maximum(highest, before)
        shift = finite(highest, pad_tokens)
        total = scores.sub_(shift).exp_().sum(dim=-1, keepdim=True)
        if before is not None:
            total += carried * (before - shift).exp_()
        before, carried = highest, total
        if block_tokens < T:
            del scores  # so that only one block is held at a time
    if pad_tokens is not None:
        total = total.masked_fill(total == 0, 1.0)
    shares = total.reciprocal_().transpose(-1, -2)
    if block_tokens >= T:  # the single block already holds exponentials
        return reduce_group((shares @ scores[..., : T - W]).squeeze(-2), Hkv, group_reduce)
    votes = []
    for start in range(0, max(1, T - W), block_tokens):
        scores = scores_of(start, min(start + block_tokens, T - W)).sub_(shift).exp_()
        votes.append(reduce_group((shares @ scores).squeeze(-2), Hkv, group_reduce))
    return torch.cat(votes, dim=-1)


def finite(highest: Tensor, pad_tokens: Tensor | None) -> Tensor:
    """Replace minus infinity by zero among the highest scores of rows.

    It is the highest score of a padding query, which sees no key.

    Args:
        highest: the highest score of each row, in any shape.
        pad_tokens: (B,) leading padding, or None, for which `highest` is returned.
    """
    if pad_tokens is None:
        return highest
    return highest.masked_fill(highest.isneginf(), 0.0)


def hide_unseen(scores: Tensor, start: int, tokens: int, pad_tokens: Tensor | None) -> Tensor:
    """Set the scores of keys that a query must not see to minus infinity.

    These are the keys after the query, and padding. Changes `scores` in place.

    Args:
        scores: (B, Hq, W, n) of keys `start` to `start` + n.
        start: index of the first key.
        tokens: T, tokens of the prompt.
        pad_tokens: (B,) leading padding, or None.

    Returns:
        `scores`.
    """
    W, stop = scores.shape[2], start + scores.shape[3]
    first = max(start, tokens - W)  # before it, the whole window sees every token
    if first < stop:
        ahead = torch.ones(W, stop - first, dtype=torch.bool, device=scores.device)
        ahead.triu_(tokens - W - first + 1)
        scores[..., first - start :].masked_fill_(ahead, float("-inf"))
    if pad_tokens is not None:
        slots = torch.arange(start, stop, device=scores.device)
        pads = slots < pad_tokens[:, None, None, None]
        scores.masked_fill_(pads, float("-inf"))
    return scores


def fade_votes(votes: Tensor, decay: float) -> Tensor:
    """Fade the votes in steps whose width doubles each time.

    The result is that of `snapkv.ops.votes.reference.fade_votes` up to rounding. After a step of
    width n, the vote of every position includes the faded votes of the n positions before it. If
    the factor is too small for float32, no vote reaches further.

    Args:
        votes: (B, H, P) float32, which stay unchanged.
        decay: the factor per position, in (0, 1).

    Returns:
        (B, H, P) float32.
    """
    least = torch.finfo(torch.float32).tiny
    factors, width = [1.0], 1
    while width < votes.shape[-1] and factors[-1] > least:
        factors.append(max(decay**width, least))
        width *= 2
    faded = F.pad(votes, (width - 1, 0), value=float("-inf"))  # raises nothing
    for step, factor in enumerate(factors[1:]):
        faded = torch.maximum(faded[..., 2**step :], faded[..., : -(2**step)] * factor)
    return faded


def gather_tokens(states: Tensor, keep_indices: Tensor) -> Tensor:
    """Copy the selected tokens, with one index and one copy for each token.

    The arguments and the result are those of `snapkv.ops.votes.reference.gather_tokens`.

    Returns:
        (B, max(H, Hs), K, D).
    """
    if not states.is_contiguous():  # making them contiguous would copy dropped tokens, too
        return reference.gather_tokens(states, keep_indices)
    return _copied(states, flat_rows(states, keep_indices.clamp(min=0)))


def gather_pair(keys: Tensor, values: Tensor, keep_indices: Tensor) -> tuple[Tensor, Tensor]:
    """Copy the selected tokens of both keys and values; see `gather_tokens`.

    Returns:
        (B, max(H, Hs), K, D) keys and (B, max(H, Hs), K, Dv) values.
    """
    if not (keys.is_contiguous() and values.is_contiguous()):
        return gather_tokens(keys, keep_indices), gather_tokens(values, keep_indices)
    rows = flat_rows(keys, keep_indices.clamp(min=0))
    return _copied(keys, rows), _copied(values, rows)


def _copied(states: Tensor, rows: Tensor) -> Tensor:
    flat = states.flatten(0, 2).index_select(0, rows.flatten())
    return flat.view(*rows.shape, states.shape[-1])


def flat_rows(states: Tensor, keep_indices: Tensor) -> Tensor:
    """Convert slots of each head into row numbers of `states.flatten(0, 2)`.

    Args:
        states: (B, Hs, T, D); only the shape and the device are used.
        keep_indices: (B, H, K) int64 slots. H is 1, Hs or a multiple of Hs. With 1, all heads use
            the same slots. With a multiple, H / Hs consecutive heads read the same states.

    Returns:
        (B, max(H, Hs), K) int64; the result for an entry of -1 is meaningless and may be negative.
    """
    B, Hs, T, _ = states.shape
    heads, step = max(keep_indices.shape[1], Hs), max(1, T)
    begins = torch.arange(0, B * Hs * step, step, device=states.device).view(B, Hs, 1, 1)
    rows = keep_indices.expand(-1, heads, -1).view(B, Hs, heads // Hs, -1) + begins
    return rows.flatten(1, 2)
