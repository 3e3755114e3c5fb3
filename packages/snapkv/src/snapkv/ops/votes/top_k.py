"""The best of every head, ties and pads decided. Axes as in `snapkv.ops.votes.reference`."""

from collections.abc import Sequence

import torch
from torch import Tensor


def keep_best(
    scores: Tensor,
    keep_tokens: Sequence[int] | Tensor,
    pad_tokens: Tensor | None = None,
    *,
    first_tokens: int = 0,
    protected: Tensor | None = None,
) -> Tensor:
    """Top-k of every head, ascending: a pad never wins, of equal scores the lower position does.

    Every head returns as many entries as the one that keeps most. A head that keeps fewer begins
    with -1, so that what must be hidden later is always a leading run.

    Args:
        scores: (B, H, P) float32.
        keep_tokens: B numbers, how many real positions each row keeps, 0 to P; or a tensor of
            them, (B,) or (B, H) int64, for which a GPU has to be waited for.
        pad_tokens: (B,), leading pads of each row; a pad never beats a token.
        first_tokens: how many of a row's first real positions come before all others, whatever
            their scores; they count among `keep_tokens`.
        protected: (B, Hp, P) bool, positions that come before all others in the same way, no pads
            among them, with the first tokens no more than are kept. Hp is 1, H or a divisor of it;
            where `scores` has one head, each of Hp chooses for itself.

    Returns:
        (B, H, max(keep_tokens)) int64, ascending and but for -1 unique along the last axis.
    """
    if protected is not None:
        heads = max(scores.shape[1], protected.shape[1])
        scores = scores.repeat_interleave(heads // scores.shape[1], dim=1)
        protected = protected.repeat_interleave(heads // protected.shape[1], dim=1)
        scores = scores.masked_fill(protected, float("inf"))
    slots = torch.arange(scores.shape[-1], device=scores.device)
    pads = 0 if pad_tokens is None else pad_tokens[:, None, None]
    if first_tokens:
        scores = scores.masked_fill(slots < pads + first_tokens, float("inf"))
    if pad_tokens is not None:
        scores = scores.masked_fill(slots < pads, float("-inf"))
    if isinstance(keep_tokens, Tensor):
        least, most = 0, int(keep_tokens.max())
    else:
        least, most = min(keep_tokens), max(keep_tokens)
    if 0 < least == most and _is_at_hand(scores):
        highest = torch.topk(scores, most, dim=-1, sorted=False).values
        lowest = highest.amin(dim=-1, keepdim=True)  # NaN where one of them is
        if not lowest.isnan().any():
            return _places(scores, highest, lowest)
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :most]
    if least < most:
        wanted = torch.as_tensor(keep_tokens, device=scores.device).view(scores.shape[0], -1, 1)
        order = order.masked_fill(torch.arange(most, device=scores.device) >= wanted, -1)
    return order.sort(dim=-1).values


def _is_at_hand(states: Tensor) -> bool:
    """Whether Python may ask for a value without waiting for a device."""
    return states.is_cpu


def _places(scores: Tensor, highest: Tensor, least: Tensor) -> Tensor:
    """Where the K highest scores, (B, H, K), are, without putting all the others in order."""
    places = (scores >= least).nonzero()
    if len(places) > highest.numel():
        places = _first_of_equals(scores, least, highest.shape[-1]).nonzero()
    return places[:, -1].view(highest.shape)


def best_of(scores: Tensor, counts: Sequence[int]) -> Tensor:
    """(B, H, S) bool: the highest scores of each head, of equal ones the first.

    B counts say how many of a row's heads, at least one; where one has fewer slots, all.
    """
    lowest = [max(1, scores.shape[-1] - count + 1) for count in counts]
    least = torch.stack(
        [row.kthvalue(k, keepdim=True).values for row, k in zip(scores, lowest, strict=True)]
    )
    wanted = torch.as_tensor(counts, device=scores.device).view(-1, 1, 1)
    return _first_of_equals(scores, least, wanted)


def _first_of_equals(scores: Tensor, least: Tensor, counts: Tensor | int) -> Tensor:
    """(B, H, S) bool: so many of each head, of those that tie with the least of them the first."""
    above, tied = scores > least, scores == least
    room = counts - above.sum(dim=-1, keepdim=True)
    return above | (tied & (tied.cumsum(dim=-1) <= room))


def kept_indices(kept: Tensor) -> Tensor:
    """Which slots a mask keeps, (B, H, S): ascending indices, (B, H, K), after a run of -1.

    K is the most that any head keeps.
    """
    slots = torch.arange(kept.shape[-1], device=kept.device)
    ranks = kept.cumsum(dim=-1)
    counts = ranks[..., -1:]
    most = int(counts.max()) if counts.numel() else 0
    places = (ranks + (most - 1 - counts)).masked_fill(~kept, most)
    found = torch.full((*kept.shape[:-1], most + 1), -1, device=kept.device)
    return found.scatter_(-1, places, slots.expand_as(places))[..., :most]
