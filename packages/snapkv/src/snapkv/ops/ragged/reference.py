"""Attention to heads of different length, head by head: the specification of every faster one."""

import torch
from torch import Tensor

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
    """As `snapkv.ops.ragged_attention`, one query head after the other, in float32 or wider."""
    B, Hq, Q, _ = queries.shape
    if tail_tokens is not None:
        tail_keys, tail_values = (part[:, :, :tail_tokens] for part in (tail_keys, tail_values))
    H, S = tail_keys.shape[1], tail_keys.shape[2]
    wide = torch.promote_types(queries.dtype, torch.float32)
    output = values.new_empty(B, Hq, Q, values.shape[-1])
    start = 0
    for row in range(B):
        for head in range(H):
            stop = start + layout.head_tokens[row][head]
            own_keys = torch.cat([keys[start:stop], tail_keys[row, head]]).to(wide)
            own_values = torch.cat([values[start:stop], tail_values[row, head]]).to(wide)
            seen = own_keys.shape[0] - Q + torch.arange(1, Q + 1, device=keys.device)
            hidden = torch.arange(stop - start + S, device=keys.device) >= seen[:, None]
            if own_visible is not None:
                hidden[:, hidden.shape[1] - Q :] |= ~own_visible
            start = stop
            for member in range(head * Hq // H, (head + 1) * Hq // H):
                scores = score_options.scores(queries[row, member].to(wide) @ own_keys.T)
                scores = scores.masked_fill(hidden, float("-inf"))
                total = scores.logsumexp(dim=-1, keepdim=True)
                if score_options.sink_logits is not None:
                    sink = score_options.sink_logits[member]
                    total = torch.logaddexp(total, sink.to(wide))
                output[row, member] = ((scores - total).exp() @ own_values).to(values.dtype)
    return output
