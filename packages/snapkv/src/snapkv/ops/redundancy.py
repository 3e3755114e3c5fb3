"""How much the keys of a head repeat each other, for R-KV (arXiv 2505.24133).

The axes are those of `snapkv.ops.votes.reference`, with S slots.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

MOST_COSINES = 1 << 24
"""How many cosines are computed at a time: 64 MiB, and the same again to count similar keys."""


def redundancy(
    keys: Tensor,
    *,
    threshold: float,
    exempt: int = 1,
    pad_tokens: Tensor | None = None,
    most_cosines: int = MOST_COSINES,
) -> Tensor:
    """Compute how similar each key is to the other keys of its head.

    The cosines of a key to all others of its head are averaged, and the averages of all keys go
    through a softmax, so that they add up to 1. Of the keys that are similar to another one, the
    newest are exempt: their cosines to it count as 0. So of keys that repeat each other the newest
    is the least redundant. Computed in blocks of rows, so that no (S, S) matrix is ever held.

    Args:
        keys: (B, H, S, D).
        threshold: keys are similar if their cosine is above it; at least 0.
        exempt: how many of the keys that are similar to a key are exempt.
        pad_tokens: (B,) leading slots of each row that hold no token, or None; they are similar to
            nothing.
        most_cosines: how many cosines of all rows and heads to compute at a time; at least one row
            of every head is computed.

    Returns:
        (B, H, S) float32, 0 for padding.
    """
    B, H, S, _ = keys.shape
    directions = F.normalize(keys.float(), dim=-1)
    pads = torch.zeros(B, 1, S, dtype=torch.bool, device=keys.device)
    if pad_tokens is not None:
        pads = torch.arange(S, device=keys.device) < pad_tokens[:, None, None]
        directions = directions.masked_fill(pads[..., None], 0.0)
    total = keys.new_zeros(B, H, S, dtype=torch.float32)
    rows = max(1, most_cosines // (B * H * S))
    for start in range(0, S, rows):
        cosines = directions[:, :, start : start + rows] @ directions.transpose(-1, -2)
        cosines.diagonal(offset=start, dim1=-2, dim2=-1).zero_()
        similar = cosines > threshold
        newer_or_own = similar.flip(-1).cumsum(dim=-1, dtype=torch.int32).flip(-1)
        total += cosines.masked_fill_(similar & (newer_or_own <= exempt), 0.0).sum(dim=-2)
    means = total / (~pads).sum(dim=-1, keepdim=True)
    return means.masked_fill_(pads, float("-inf")).softmax(dim=-1).masked_fill(pads, 0.0)
