"""Attention to heads of different lengths by torch's flash attention for CPUs, head by head.

The query heads of a group are rows of one call, so that a key is read once for all of them, and
what a head keeps is read without a copy. Each call also returns the logarithm of its softmax's
denominator, with which the kept part and the tail are combined.
"""

import torch
from torch import Tensor

from snapkv.ops.ragged.blocked import sinks_of_rows
from snapkv.ops.ragged.inputs import TailInputs
from snapkv.ops.ragged.layout import RaggedLayout


def ragged_attention(
    inputs: TailInputs, keys: Tensor, values: Tensor, layout: RaggedLayout
) -> Tensor:
    """Compute attention to the kept tokens with the flash attention of torch, without gradients.

    The arguments are those of `snapkv.ops.ragged_attention`. The softmax is in float32 or wider.

    Returns:
        (B, Hq, Q, Dv), in the dtype of `values`.
    """
    (B, Hq, Q, D), H = inputs.queries.shape, inputs.tail_keys.shape[1]
    rows = inputs.queries.reshape(1, B * H, Hq // H * Q, D)
    scale, attended, start = inputs.score_options.scaling, [], 0
    for head, count in enumerate(layout.counts):
        mine, own = slice(start, start + count), rows[:, head : head + 1]
        attended.append(_attend(own, keys[None, None, mine], values[None, None, mine], None, scale))
        start += count
    of_heads, of_sums = zip(*attended, strict=True)
    of_kept, kept = torch.cat(of_heads, dim=1), torch.cat(of_sums, dim=1)
    mask = None
    if Q > 1 or inputs.tail_tokens is not None:
        hidden = inputs.hidden()
        mask = torch.zeros_like(hidden, dtype=rows.dtype).masked_fill_(hidden, -torch.inf)
        mask = mask.repeat(Hq // H, 1)[None, None]
    tail = inputs.tail_keys.flatten(0, 1)[None], inputs.tail_values.flatten(0, 1)[None]
    of_tail, tailed = _attend(rows, *tail, mask, scale)
    share = (kept - tailed).sigmoid_()[..., None]
    output = of_tail.to(share.dtype).lerp_(of_kept.to(share.dtype), share)
    if (logits := sinks_of_rows(inputs.score_options, rows[0], Q)) is not None:
        output = output * (torch.logaddexp(kept, tailed)[..., None] - logits).sigmoid_()
    return output.to(values.dtype).view(B, Hq, Q, -1)


def _attend(
    rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the attention of one head, and the logarithm of the softmax's denominator.

    Returns:
        (1, H, R, Dv) and (1, H, R).
    """
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    attended: tuple[Tensor, Tensor] = attend(rows, keys, values, attn_mask=mask, scale=scale)
    return attended


def obstacle(inputs: TailInputs, values: Tensor, layout: RaggedLayout) -> str | None:
    """Return the reason why this implementation cannot be used, or None if it can."""
    queries = inputs.queries
    if queries.device.type != "cpu":
        return "on a device that is not a CPU"
    if torch.is_grad_enabled() and (queries.requires_grad or values.requires_grad):
        return "with gradients"
    if inputs.score_options.softcap is not None:
        return "with capped scores"
    if values.shape[-1] != queries.shape[-1]:
        return "with values of another width than keys"
    if not layout.fewest_tokens:
        return "with heads that hold nothing"
    return None
