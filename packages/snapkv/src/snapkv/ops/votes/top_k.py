"""The best of every head, ties and pads decided. Axes as in `snapkv.ops.votes.reference`."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from snapkv.ops.numbers import on_device


def keep_best(
    scores: Tensor,
    keep_tokens: Sequence[int] | Sequence[Sequence[int]],
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
        keep_tokens: B numbers, how many real positions each row keeps, 0 to P; or B lists of
            H numbers, of each head.
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
    if first_tokens:
        scores = fill_first(scores, first_tokens, float("inf"), pad_tokens)
    if pad_tokens is not None:
        scores = fill_first(scores, 0, float("-inf"), pad_tokens)
    rows = [[each] if isinstance(each, int) else each for each in keep_tokens]
    least, most = min(map(min, rows)), max(map(max, rows))
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :most]
    if least < most:
        wanted = on_device(rows, scores.device)[..., None]
        order = order.masked_fill(torch.arange(most, device=scores.device) >= wanted, -1)
    return order.sort(dim=-1).values


def fill_first(
    scores: Tensor, first_tokens: int, value: float, pad_tokens: Tensor | None = None
) -> Tensor:
    """(B, H, P) scores that are `value` at so many first tokens of each row, and at its pads."""
    slots = scores.shape[-1]
    if pad_tokens is None:
        first = min(first_tokens, slots)
        return F.pad(scores[..., first:], (first, 0), value=value) if first else scores
    order = torch.arange(slots, device=scores.device)
    return scores.masked_fill(order < pad_tokens[:, None, None] + first_tokens, value)


def mask_best(scores: Tensor, counts: Sequence[int]) -> Tensor:
    """(B, H, S) bool: the highest scores of each head, of equal ones the first.

    B counts say how many of a row's heads, at least one; where one has fewer slots, all.
    """
    slots = scores.shape[-1]
    least = torch.stack(
        [_least_of_best(row, min(count, slots)) for row, count in zip(scores, counts, strict=True)]
    )
    wanted = on_device(counts, scores.device).view(-1, 1, 1)
    return _first_of_equals(scores, least, wanted)


def _least_of_best(scores: Tensor, count: int) -> Tensor:
    """(H, 1): the lowest of so many of each head's highest scores."""
    if scores.is_cuda:  # where the k-th of a long row is found by one block of threads
        return scores.topk(count, sorted=False).values.amin(dim=-1, keepdim=True)
    return scores.kthvalue(scores.shape[-1] - count + 1, keepdim=True).values


def _first_of_equals(scores: Tensor, least: Tensor, counts: Tensor | int) -> Tensor:
    """(B, H, S) bool: so many of each head, of those that tie with the least of them the first."""
    above, tied = scores > least, scores == least
    room = counts - above.sum(dim=-1, keepdim=True)
    return above | (tied & (tied.cumsum(dim=-1) <= room))


def kept_indices(kept: Tensor, most: int | None = None) -> Tensor:
    """Which slots a mask keeps, (B, H, S): ascending indices, (B, H, K), after a run of -1.

    K is the most that any head keeps; a GPU is waited for where that is not given.
    """
    if most is None:
        most = int(kept.sum(dim=-1).max()) if kept.numel() else 0
    is_kept, order = torch.sort(kept.view(torch.uint8), dim=-1, stable=True)
    last = kept.shape[-1] - most
    return order[..., last:].masked_fill(is_kept[..., last:] == 0, -1)
