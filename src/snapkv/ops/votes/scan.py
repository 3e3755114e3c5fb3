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
    faded, width = votes.clone(), 1
    while width < votes.shape[-1] and decay**width >= torch.finfo(torch.float32).tiny:
        carried = faded[..., :-width] * decay**width
        torch.maximum(faded[..., width:], carried, out=faded[..., width:])
        width *= 2
    return faded
