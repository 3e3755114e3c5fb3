"""Attention to heads in few bits: what runs where."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from snapkv.ops.choice import implementation, triton_obstacle
from snapkv.ops.codes import blocked, reference
from snapkv.ops.codes.coding import Codes
from snapkv.ops.codes.layout import BlockLayout
from snapkv.ops.scores import ScoreOptions

CodedImplementation = Literal["auto", "reference", "blocked", "triton"]

_IN_TORCH: dict[str, Callable[..., Tensor]] = {
    "reference": reference.coded_attention,
    "blocked": blocked.coded_attention,
}


def coded_attention(
    queries: Tensor,
    keys: Codes,
    values: Codes,
    layout: BlockLayout,
    tail_keys: Tensor,
    tail_values: Tensor,
    score_options: ScoreOptions,
    *,
    own_visible: Tensor | None = None,
    tail_tokens: Tensor | None = None,
    impl: CodedImplementation = "auto",
) -> Tensor:
    """As `snapkv.ops.ragged_attention`, where what the heads keep is held in few bits.

    Args:
        queries: (B, Hq, Q, D).
        keys: M blocks of codes, in groups along tokens.
        values: M blocks of codes, in groups along channels; their bits may be others.
        layout: which head each block belongs to; all of it lies in the past.
        tail_keys: (B, H, S, D), in the model's dtype; the last Q are the queries' own.
        tail_values: (B, H, S, Dv).
        score_options: what the model's attention does to its scores.
        own_visible: see `snapkv.ops.ragged_attention`.
        tail_tokens: likewise.
        impl: "reference", by way of what the codes stand for; "blocked", a few products that take
            the integers as they are; "triton", a kernel for CUDA. "auto" takes the kernel where it
            can run, else "blocked".

    Returns:
        (B, Hq, Q, Dv), in the dtype of the tail's values.

    Raises:
        InvalidArgumentError: an unknown implementation, or one that cannot run here.
    """
    attend = implementation(
        "coded_attention",
        impl,
        queries,
        _IN_TORCH,
        fitting="blocked",
        kernels="snapkv.ops.codes.triton",
        obstacle=lambda: _obstacle(queries, values, own_visible),
    )
    states = queries, keys, values, layout, tail_keys, tail_values
    return attend(*states, score_options, own_visible=own_visible, tail_tokens=tail_tokens)


def _obstacle(queries: Tensor, values: Codes, own_visible: Tensor | None) -> str | None:
    """Why the kernel cannot run, or None."""
    if own_visible is not None:
        return "for a tree of candidates, whose branches it cannot hide from each other"
    if queries.dtype == torch.float32 and max(queries.shape[-1], values.channels) > 64:
        return "with float32 heads of more than 64 channels, which fill its registers"
    return triton_obstacle(queries)
