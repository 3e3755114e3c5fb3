"""Causal attention of a prompt's piece to what was read before it and to itself, on a GPU.

torch has a kernel of its own for a mask that ends in the lower right corner; on Hopper cuDNN's is
twice as fast, but knows only as many queries as keys. So the piece attends to what stands before
it, of which it sees everything, then to itself, and the two are put together.
"""

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention


def is_faster_in_parts(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `attend_in_parts` runs here and gains: on Hopper and later, without gradients."""
    if not queries.is_cuda or torch.cuda.get_device_capability(queries.device) < (9, 0):
        return False
    if torch.is_grad_enabled() and any(each.requires_grad for each in (queries, keys, values)):
        return False
    new = queries.shape[2]
    own = keys[:, :, -new:], values[:, :, -new:]
    return can_use_cudnn_attention(SDPAParams(queries, *own, None, 0.0, True, True))


def attend_in_parts(queries: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
    """What the last Q of S tokens attend to, each up to itself.

    Args:
        queries: (B, Hq, Q, D), Q < S.
        keys: (B, Hkv, S, D).
        values: (B, Hkv, S, Dv).
        scaling: of the scores; D**-0.5 where None.

    Returns:
        (B, Hq, Q, Dv), in the dtype of `queries`.
    """
    past = keys.shape[2] - queries.shape[2]
    before, sum_before = _cudnn(queries, keys[:, :, :past], values[:, :, :past], False, scaling)
    own, sum_own = _cudnn(queries, keys[:, :, past:], values[:, :, past:], True, scaling)
    share = (sum_before - sum_own).sigmoid().view(*own.shape[:3], 1)
    return torch.addcmul(own, share, before - own).to(queries.dtype)


def _cudnn(
    queries: Tensor, keys: Tensor, values: Tensor, is_causal: bool, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """Attention, causal or not: (B, Hq, Q, Dv), and its log-sum-exp, of B * Hq * Q numbers."""
    attended = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries, keys, values, None, True, 0.0, is_causal, scale=scaling
    )
    return attended[0], attended[1]
