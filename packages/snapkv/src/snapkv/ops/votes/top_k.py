"""Select the highest scores of every head, with fixed rules for ties and padding.

The axes are those of `snapkv.ops.votes.reference`.
"""

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
    """Return the positions of the highest scores in each head, in ascending order.

    Of equal scores the lower position wins, and padding never beats a token. All heads return as
    many entries as the head that keeps most; a head that keeps fewer begins with -1, so that the
    entries to be hidden later are always the first ones.

    Args:
        scores: (B, H, P) float32.
        keep_tokens: B numbers, how many real positions each row keeps, 0 to P; or B lists of H
            numbers, one for each head.
        pad_tokens: (B,), leading padding of each row, or None.
        first_tokens: how many of a row's first real positions are selected before all others,
            whatever their scores; they count among `keep_tokens`.
        protected: (B, Hp, P) bool, positions that are selected before all others in the same way.
            The caller must not include padding, nor, together with the first tokens, more than are
            kept. Hp is 1, H or a divisor of H; if `scores` has one head, each of Hp selects for
            itself.

    Returns:
        (B, H, max(keep_tokens)) int64, ascending and, except for -1, unique along the last axis.
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
    """Replace the scores of the first tokens in each row, and those of padding, by a value.

    Args:
        scores: (B, H, P), which stays unchanged.
        first_tokens: how many tokens after the padding to replace.
        value: the replacement.
        pad_tokens: (B,), leading padding of each row, or None.

    Returns:
        (B, H, P).
    """
    slots = scores.shape[-1]
    if pad_tokens is None:
        first = min(first_tokens, slots)
        return F.pad(scores[..., first:], (first, 0), value=value) if first else scores
    order = torch.arange(slots, device=scores.device)
    return scores.masked_fill(order < pad_tokens[:, None, None] + first_tokens, value)


def mask_best(scores: Tensor, counts: Sequence[int]) -> Tensor:
    """Return a mask of the highest scores in each head.

    If scores are equal, the first one wins.

    Args:
        scores: (B, H, S).
        counts: B numbers, how many each of a row's heads selects, at least 1; all slots if it has
            fewer.

    Returns:
        (B, H, S) bool.
    """
    slots = scores.shape[-1]
    least = torch.stack(
        [_least_of_best(row, min(count, slots)) for row, count in zip(scores, counts, strict=True)]
    )
    wanted = on_device(counts, scores.device).view(-1, 1, 1)
    return _first_of_equals(scores, least, wanted)


def _least_of_best(scores: Tensor, count: int) -> Tensor:
    """Return the lowest of the highest scores in each head.

    Args:
        scores: (H, S).
        count: how many of the highest scores to consider.

    Returns:
        (H, 1).
    """
    if scores.is_cuda:  # `kthvalue` uses a single block of threads for a long row
        return scores.topk(count, sorted=False).values.amin(dim=-1, keepdim=True)
    return scores.kthvalue(scores.shape[-1] - count + 1, keepdim=True).values


def _first_of_equals(scores: Tensor, least: Tensor, counts: Tensor | int) -> Tensor:
    """Return a mask of all scores that are high enough to be selected.

    These are the scores above `least`, and the first of those that are equal to it.

    Args:
        scores: (B, H, S).
        least: (B, H, 1), the lowest score that is selected.
        counts: how many to select of each head.

    Returns:
        (B, H, S) bool.
    """
    above, tied = scores > least, scores == least
    room = counts - above.sum(dim=-1, keepdim=True)
    return above | (tied & (tied.cumsum(dim=-1) <= room))


def kept_indices(kept: Tensor, most: int | None = None) -> Tensor:
    """Convert a mask of slots into the indices of the slots.

    Args:
        kept: (B, H, S) bool.
        most: K, the most slots that any head keeps; None to count them, which waits for a GPU.

    Returns:
        (B, H, K) ascending indices after a run of -1.
    """
    if most is None:
        most = int(kept.sum(dim=-1).max()) if kept.numel() else 0
    is_kept, order = torch.sort(kept.view(torch.uint8), dim=-1, stable=True)
    last = kept.shape[-1] - most
    return order[..., last:].masked_fill(is_kept[..., last:] == 0, -1)
