"""A recurrence along the prefix in as many steps as the prefix has binary digits.

Axes as in `snapkv.ops.votes.reference`.
"""

import torch
from torch import Tensor


def fade_votes(votes: Tensor, decay: float) -> Tensor:
    """As `snapkv.ops.votes.reference.fade_votes`, up to rounding.

    After a step of width n, every position has what the n before it carry on to it; the next step
    is twice as wide. Where the factor has left float32, no vote reaches further.
    """
    least = torch.finfo(torch.float32).tiny
    faded, width, factor = votes, 1, 1.0
    while width < votes.shape[-1] and factor > least:
        factor = max(decay**width, least)
        lifted = torch.maximum(faded[..., width:], faded[..., :-width] * factor)
        faded, width = torch.cat([faded[..., :width], lifted], dim=-1), 2 * width
    return faded
