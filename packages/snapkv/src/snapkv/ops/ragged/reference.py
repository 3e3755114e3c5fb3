"""Attention to heads of different lengths, head by head: the specification of every faster one."""

import torch
from torch import Tensor

from snapkv.ops.ragged.inputs import TailInputs
from snapkv.ops.ragged.layout import RaggedLayout


def ragged_attention(
    inputs: TailInputs, keys: Tensor, values: Tensor, layout: RaggedLayout
) -> Tensor:
    """Compute attention to the kept tokens one head at a time, in float32 or wider.

    The arguments are those of `snapkv.ops.ragged_attention`.

    Returns:
        (B, Hq, Q, Dv), in the dtype of `values`.
    """
    queries, own_visible, options = inputs.queries, inputs.own_visible, inputs.score_options
    tail_keys = inputs.tail_keys[:, :, : inputs.tail_tokens]
    tail_values = inputs.tail_values[:, :, : inputs.tail_tokens]
    (B, Hq, Q, _), (H, S) = queries.shape, tail_keys.shape[1:3]
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
                scores = options.scores(queries[row, member].to(wide) @ own_keys.T)
                scores = scores.masked_fill(hidden, float("-inf"))
                total = scores.logsumexp(dim=-1, keepdim=True)
                if options.sink_logits is not None:
                    sink = options.sink_logits[member]
                    total = torch.logaddexp(total, sink.to(wide))
                output[row, member] = ((scores - total).exp() @ own_values).to(values.dtype)
    return output
