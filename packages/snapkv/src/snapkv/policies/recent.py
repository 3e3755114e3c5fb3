"""Keeping the best of the older tokens and all of the most recent ones."""

import torch
from torch import Tensor

from snapkv import ops


def keep_best_and_recent(
    scores: Tensor,
    best_tokens: int | Tensor,
    recent_tokens: int,
    filler_tokens: Tensor | None,
    protected: Tensor | None = None,
) -> Tensor:
    """Top-k of the older slots and all of the most recent ones; fillers go first.

    Args:
        scores: (B, H, S) float32 over all slots; those of the recent ones are not looked at.
        best_tokens: how many of the older slots to keep, of all rows or (B,) of each.
        recent_tokens: how many of the last slots to keep.
        filler_tokens: (B,) leading slots that hold pads, or None.
        protected: slots that come before all others, as `ops.keep_best` takes them.

    Returns:
        (B, H, best + recent) int64, ascending; (B, H, S) where there are no more slots than that;
        rows that keep fewer than others begin with -1.
    """
    S = scores.shape[-1]
    older = max(S - recent_tokens, 0)
    best = ops.keep_best(
        scores[..., :older],
        _wanted(scores, best_tokens, older, filler_tokens),
        filler_tokens,
        protected=None if protected is None else protected[..., :older],
    )
    recent = torch.arange(older, S, device=scores.device)
    return torch.cat([best, recent.expand(*best.shape[:2], -1)], dim=-1)


def _wanted(
    scores: Tensor, best_tokens: int | Tensor, older: int, filler_tokens: Tensor | None
) -> list[int] | Tensor:
    """How many of the older slots each row keeps; numbers where all keep the same."""
    B = scores.shape[0]
    if filler_tokens is None and isinstance(best_tokens, int):
        return [min(best_tokens, older)] * B
    wanted = torch.as_tensor(best_tokens, device=scores.device).expand(B).clamp(max=older)
    if filler_tokens is None:
        return wanted
    return wanted.minimum((older - filler_tokens).clamp(min=0))
