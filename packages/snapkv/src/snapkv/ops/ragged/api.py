"""Attention to heads that hold different numbers of tokens (varlen): what runs where."""

import functools
import operator
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from snapkv.errors import InvalidArgumentError
from snapkv.ops.choice import implementation, triton_obstacle
from snapkv.ops.ragged import blocked, flash, reference
from snapkv.ops.ragged.layout import RaggedLayout
from snapkv.ops.scores import ScoreOptions

RaggedImplementation = Literal["auto", "reference", "flash", "blocked", "triton"]

FLASH_ELEMENTS = 2**20
"""On a CPU, one query of layers with no more elements of keys than this takes a call per head."""

_DTYPE = operator.attrgetter("dtype")

_IN_TORCH: dict[str, Callable[..., Tensor]] = {
    "reference": reference.ragged_attention,
    "flash": flash.ragged_attention,
    "blocked": blocked.ragged_attention,
}


def ragged_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: RaggedLayout,
    tail_keys: Tensor,
    tail_values: Tensor,
    score_options: ScoreOptions,
    *,
    own_visible: Tensor | None = None,
    tail_tokens: Tensor | None = None,
    impl: RaggedImplementation = "auto",
) -> Tensor:
    """Varlen attention of the last Q tokens: to what their head keeps and to the common tail.

    Args:
        queries: (B, Hq, Q, D).
        keys: (N, D), what the heads keep, all of it in the past; rows first, then heads.
        values: (N, Dv).
        layout: how many of the N belong to each row's each head.
        tail_keys: (B, H, S, D), the append buffer: the tokens after; the last Q are the queries'
            own, each of which sees itself and what came before.
        tail_values: (B, H, S, Dv).
        score_options: what the model's attention does to its scores.
        own_visible: (Q, Q) bool, lower triangular: which of the queries' own tokens each of them
            sees, where they are a tree of candidates; None for itself and those before it.
        tail_tokens: () int64, how many of the S are written, where that is to be known to the
            device alone; None for all.
        impl: "reference", the plain definition; "flash", torch's attention for CPUs, once per head;
            "blocked", a few products for all heads; "triton", a kernel for CUDA. "auto" takes the
            kernel where it can run, else "flash" on a CPU, and "blocked" for one query of a large
            layer and wherever "flash" cannot run.

    Returns:
        (B, Hq, Q, Dv), in the dtype of the states; in the widest where theirs differ, as under
        `torch.autocast`.

    Raises:
        InvalidArgumentError: an unknown implementation, or one that cannot run here.
    """
    together = queries, keys, values, tail_keys, tail_values
    if len(dtypes := set(map(_DTYPE, together))) > 1:
        wide = functools.reduce(torch.promote_types, dtypes)
        queries, keys, values, tail_keys, tail_values = (each.to(wide) for each in together)
    fits = queries.shape[2] > 1 or keys.numel() <= FLASH_ELEMENTS
    reason = None
    if impl == "flash" or (fits and impl == "auto"):
        reason = flash.obstacle(queries, values, layout, score_options)
        fits = reason is None
    if impl == "flash" and reason is not None:
        raise InvalidArgumentError(
            f"impl: expected one that can run here, got 'flash' {reason}; pass impl='auto'"
        )
    attend = implementation(
        "ragged_attention",
        impl,
        queries,
        _IN_TORCH,
        fitting="flash" if fits else "blocked",
        kernels="snapkv.ops.ragged.triton",
        obstacle=lambda: _obstacle(queries, own_visible),
    )
    states = queries, keys, values, layout, tail_keys, tail_values
    return attend(*states, score_options, own_visible=own_visible, tail_tokens=tail_tokens)


def _obstacle(queries: Tensor, own_visible: Tensor | None) -> str | None:
    """Why the kernel cannot run, or None."""
    if own_visible is not None:
        return "for a tree of candidates, whose branches it cannot hide from each other"
    return triton_obstacle(queries)
