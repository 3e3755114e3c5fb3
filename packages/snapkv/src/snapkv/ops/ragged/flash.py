"""Attention to heads of different length by torch's flash attention for CPUs, head by head.

The query heads of a group are rows of one call, so that a key is read once for all of them, and
what a head keeps is read where it lies. Each call also gives the logarithm of its softmax's
denominator, by which the kept part and the tail are put together.
"""

import torch
from torch import Tensor

from snapkv.ops.ragged.blocked import TailStates, sinks_of_rows
from snapkv.ops.ragged.layout import RaggedLayout
from snapkv.ops.scores import ScoreOptions


def ragged_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: RaggedLayout,
    tail_keys: Tensor,
    tail_values: Tensor,
    score_options: ScoreOptions,
    *,
    own_visible: Tensor | None,
    tail_tokens: Tensor | None,
) -> Tensor:
    """As `snapkv.ops.ragged_attention`; softmax in float32 or wider, no gradients."""
    B, Hq, Q, D = queries.shape
    H, scale = tail_keys.shape[1], score_options.scaling
    counts = layout.counts
    rows = queries.reshape(1, B * H, Hq // H * Q, D)
    found, start = [], 0
    for head, count in enumerate(counts):
        mine, own = slice(start, start + count), rows[:, head : head + 1]
        found.append(_attend(own, keys[None, None, mine], values[None, None, mine], None, scale))
        start += count
    of_heads, of_sums = zip(*found, strict=True)
    of_kept, kept = torch.cat(of_heads, dim=1), torch.cat(of_sums, dim=1)
    mask = None
    if Q > 1 or tail_tokens is not None:
        hidden = TailStates(tail_keys, tail_values, tail_tokens).hidden(Q, own_visible)
        mask = torch.zeros_like(hidden, dtype=queries.dtype).masked_fill_(hidden, -torch.inf)
        mask = mask.repeat(Hq // H, 1)[None, None]
    keys_after, values_after = tail_keys.flatten(0, 1)[None], tail_values.flatten(0, 1)[None]
    of_tail, tailed = _attend(rows, keys_after, values_after, mask, scale)
    share = (kept - tailed).sigmoid_()[..., None]
    output = of_tail.to(share.dtype).lerp_(of_kept.to(share.dtype), share)
    if (logits := sinks_of_rows(score_options, rows[0], Q)) is not None:
        output = output * (torch.logaddexp(kept, tailed)[..., None] - logits).sigmoid_()
    return output.to(values.dtype).view(B, Hq, Q, -1)


def _attend(
    rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(1, H, R, Dv) attention, and (1, H, R) logarithms of the denominators."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found: tuple[Tensor, Tensor] = attend(rows, keys, values, attn_mask=mask, scale=scale)
    return found


def obstacle(
    queries: Tensor,
    values: Tensor,
    layout: RaggedLayout,
    score_options: ScoreOptions,
) -> str | None:
    """Why it cannot run, or None."""
    if queries.device.type != "cpu":
        return "beyond a CPU"
    if torch.is_grad_enabled() and (queries.requires_grad or values.requires_grad):
        return "with gradients"
    if score_options.softcap is not None:
        return "with capped scores"
    if values.shape[-1] != queries.shape[-1]:
        return "with values of another width than keys"
    if not layout.fewest_tokens:
        return "with heads that hold nothing"
    return None
