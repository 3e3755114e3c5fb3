"""The gather token by token: a key or value is copied whole, not number by number.

`torch.gather` looks an index up for every number; here there is one for every token.
"""

import torch
from torch import Tensor

from snapkv.ops.votes import reference


def gather_tokens(states: Tensor, keep_indices: Tensor) -> Tensor:
    """As `snapkv.ops.votes.reference.gather_tokens`, which takes states that are no one block."""
    if not states.is_contiguous():  # to make them so would copy what is dropped, too
        return reference.gather_tokens(states, keep_indices)
    B, Hs, T, D = states.shape
    heads, K = max(keep_indices.shape[1], Hs), keep_indices.shape[2]
    stored = torch.arange(B * heads, device=states.device).view(B, heads, 1) // (heads // Hs)
    kept = keep_indices.clamp(min=0) + stored * T
    return states.view(-1, D).index_select(0, kept.flatten()).view(B, heads, K, D)
