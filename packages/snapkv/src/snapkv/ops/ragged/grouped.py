"""Attention to heads of different length with one matrix product per head: for small layers.

The query heads of a group are rows of the product, so that a key is read once for all of them, and
what a head keeps is never copied to stand next to the tail. Only the scores are padded to one
length: they are few compared with keys and values, and one softmax then does for all heads.
"""

import torch
from torch import Tensor

from snapkv.ops.ragged.blocked import Tail, sinks_of_rows
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
    """As `snapkv.ops.ragged_attention`; products in the dtype of the states, softmax in float32."""
    B, Hq, Q, D = queries.shape
    H, S = tail_keys.shape[1], tail_keys.shape[2]
    counts = [count for row in layout.head_tokens for count in row]
    longest = max(counts)
    rows = queries.reshape(B * H, Hq // H * Q, D)
    scores = torch.full(
        (*rows.shape[:2], longest + S), float("-inf"), dtype=torch.float32, device=rows.device
    )
    scores[..., longest:] = torch.bmm(rows, tail_keys.flatten(0, 1).mT)
    for head, stored in enumerate(torch.split(keys[: sum(counts)], counts)):
        scores[head, :, longest - len(stored) : longest] = torch.mm(rows[head], stored.T)
    capped = score_options.scores(scores)
    if capped is not scores:
        scores = capped.masked_fill(scores.isneginf(), float("-inf"))
    if Q > 1 or tail_tokens is not None:
        tail = Tail(tail_keys, tail_values, tail_tokens)
        hidden = tail.hidden(Q, own_visible, before=longest)
        scores = scores.masked_fill(hidden.repeat(Hq // H, 1), float("-inf"))
    if (logits := sinks_of_rows(score_options, rows, Q)) is not None:
        scores = torch.cat([scores, logits], dim=-1)
    weights = scores.softmax(dim=-1)[..., : longest + S].to(values.dtype)
    mixed = [
        torch.mm(of_head[:, longest - len(stored) : longest], stored)
        for of_head, stored in zip(weights, torch.split(values[: sum(counts)], counts), strict=True)
    ]
    tail_weights = weights[..., longest:]
    output = torch.baddbmm(torch.stack(mixed), tail_weights, tail_values.flatten(0, 1))
    return output.view(B, Hq, Q, -1)
