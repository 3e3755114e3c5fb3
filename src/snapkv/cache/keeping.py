"""What is kept of keys, values and queries: the part a selection names, or the last tokens."""

import torch
from torch import Tensor

from snapkv import ops
from snapkv.policies import Selection


def keep_tokens(states: Tensor, selection: Selection) -> Tensor:
    """The kept tokens of a prompt's keys or values, and whatever stands behind the prompt.

    Args:
        states: (B, H, T + N, D), N tokens behind the prompt.
        selection: what to keep of the prompt.

    Returns:
        (B, H or the selection's heads, K + N, D), contiguous.
    """
    kept = ops.gather_tokens(states, selection.keep_indices)
    behind = states[..., selection.prompt_tokens :, :]
    if not behind.shape[-2]:
        return kept
    return torch.cat([kept, behind.repeat_interleave(kept.shape[1] // states.shape[1], dim=1)], -2)


def last_tokens(queries: Tensor, tokens: int) -> Tensor:
    """The last of (B, Hq, N, D), all where there are no more than that."""
    return queries[..., max(0, queries.shape[-2] - max(tokens, 0)) :, :]


def pads_first(visible: Tensor) -> Tensor:
    """(..., N) int64: the order that puts what is not visible in front of the rest."""
    return visible.byte().argsort(dim=-1, stable=True)


def put_in_order(states: Tensor, order: Tensor) -> Tensor:
    """(B, H, N, ...) states, each row in its order (B, N); a copy."""
    index = order[(slice(None), None, slice(None), *[None] * (states.ndim - 3))]
    return states.gather(2, index.expand_as(states))


def slots_of(indices: Tensor, order: Tensor) -> Tensor:
    """(B, H, K): which slots indices into states in that order (B, N) mean; -1 stays."""
    slots = order[:, None].expand(-1, indices.shape[1], -1).gather(2, indices.clamp(min=0))
    return slots.masked_fill(indices < 0, -1)
