"""Attention to heads that hold different numbers of tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Segments = Sequence[Sequence[tuple[Tensor, Tensor]]]
"""For each row and head the kept (keys, values): (n, D) and (n, Dv)."""


def ragged_attention(
    queries: Tensor,
    segments: Segments,
    tail_keys: Tensor,
    tail_values: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the last Q tokens to what their head keeps and to the common tail.

    Args:
        queries: (B, Hq, Q, D).
        segments: what each of the H heads keeps of the prompt, all of it in the past.
        tail_keys: (B, H, S, D), of the tokens behind the prompt; the last Q are the queries' own,
            each of which sees itself and what came before.
        tail_values: (B, H, S, Dv).
        scaling: factor on the scores.
        softcap: cap on the scaled scores, or None.
        sinks: (Hq,) extra logits of the softmax, or None.

    Returns:
        (B, Hq, Q, Dv), in the dtype of the values.
    """
    B, Hq, Q, _ = queries.shape
    H, S = tail_keys.shape[1], tail_keys.shape[2]
    group = Hq // H
    output = queries.new_empty(B, Hq, Q, tail_values.shape[-1])
    own = None
    if Q > 1:
        own = torch.ones(Q, S, dtype=torch.bool, device=queries.device).tril(S - Q)
    for row in range(B):
        for head in range(H):
            keys, values = segments[row][head]
            members = slice(head * group, (head + 1) * group)
            mask = None if own is None else F.pad(own, (keys.shape[0], 0), value=True)
            output[row, members] = _attend(
                queries[row, members],
                torch.cat([keys, tail_keys[row, head]]),
                torch.cat([values, tail_values[row, head]]),
                mask,
                scaling=scaling,
                softcap=softcap,
                sinks=None if sinks is None else sinks[members],
            )
    return output


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One KV head: (G, Q, D) queries over (n, D) keys; (G, Q, Dv)."""
    if softcap is None and sinks is None:
        group = queries.shape[0]
        return F.scaled_dot_product_attention(
            queries[None],
            keys.expand(1, group, -1, -1),
            values.expand(1, group, -1, -1),
            attn_mask=mask,
            scale=scaling,
        )[0]
    scores = (queries.float() @ keys.float().T) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    total = scores.logsumexp(dim=-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float()[:, None, None])
    return (scores - total).exp().to(values.dtype) @ values
