"""Causal attention of the last tokens of a prompt to everything before them, on a GPU.

torch has its own kernel for a mask that ends in the lower right corner. cuDNN's kernel is twice as
fast on Hopper, but it needs the same number of queries and keys. So the queries attend to the
tokens before them, all of which they see, and then to themselves, and the two results are combined.
"""

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention


def is_faster_in_parts(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return whether `attend_in_parts` can be used for these tensors and is faster.

    It is faster on GPUs of the Hopper generation or later, and it computes no gradients.
    """
    if not queries.is_cuda or torch.cuda.get_device_capability(queries.device) < (9, 0):
        return False
    if torch.is_grad_enabled() and any(each.requires_grad for each in (queries, keys, values)):
        return False
    new = queries.shape[2]
    own = keys[:, :, -new:], values[:, :, -new:]
    return can_use_cudnn_attention(SDPAParams(queries, *own, None, 0.0, True, True))


def attend_in_parts(queries: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
    """Compute the causal attention of the last tokens to all tokens.

    Args:
        queries: (B, Hq, Q, D), Q < S.
        keys: (B, Hkv, S, D).
        values: (B, Hkv, S, Dv).
        scaling: factor of the scores; D**-0.5 if None.

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
    """Compute attention with the kernel of cuDNN.

    Returns:
        (B, Hq, Q, Dv), and the logarithm of the softmax's denominator as B * Hq * Q numbers.
    """
    attended = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries, keys, values, None, True, 0.0, is_causal, scale=scaling
    )
    return attended[0], attended[1]
