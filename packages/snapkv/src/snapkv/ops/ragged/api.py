"""Attention to heads that hold different numbers of tokens, and which implementation runs."""

import functools
import operator
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from snapkv.errors import wrong
from snapkv.ops.choice import implementation, triton_obstacle
from snapkv.ops.ragged import blocked, flash, reference
from snapkv.ops.ragged.inputs import TailInputs
from snapkv.ops.ragged.layout import RaggedLayout

RaggedImplementation = Literal["auto", "reference", "flash", "blocked", "triton"]

FLASH_ELEMENTS = 2**20
"""The most elements of keys for which one query on a CPU takes a call of "flash" per head."""

_DTYPE = operator.attrgetter("dtype")

_IN_TORCH: dict[str, Callable[..., Tensor]] = {
    "reference": reference.ragged_attention,
    "flash": flash.ragged_attention,
    "blocked": blocked.ragged_attention,
}


def ragged_attention(
    inputs: TailInputs,
    keys: Tensor,
    values: Tensor,
    layout: RaggedLayout,
    *,
    impl: RaggedImplementation = "auto",
) -> Tensor:
    """Compute the attention of the last tokens to the tokens that their heads have kept.

    Each head holds a different number of tokens. The tail, which all heads share, is attended to as
    well.

    Args:
        inputs: the queries, the tail and how scores are computed.
        keys: (N, D), what the heads keep: rows of the batch first, then heads.
        values: (N, Dv).
        layout: how many of the N tokens belong to each head of each row.
        impl: "reference", the plain definition; "flash", torch's attention for CPUs, once per head;
            "blocked", a few products for all heads; "triton", a kernel for CUDA. "auto" takes the
            kernel if it can run, else "flash" on a CPU, and "blocked" for one query of a large
            layer and wherever "flash" cannot run.

    Returns:
        (B, Hq, Q, Dv), in the dtype of the states; in the widest if theirs differ, as under
        `torch.autocast`.

    Raises:
        InvalidArgumentError: `impl` is unknown or cannot run here.
    """
    states = inputs.queries, keys, values, inputs.tail_keys, inputs.tail_values
    if len(dtypes := set(map(_DTYPE, states))) > 1:
        wide = functools.reduce(torch.promote_types, dtypes)
        inputs, keys, values = inputs.to(wide), keys.to(wide), values.to(wide)
    fits = inputs.queries.shape[2] > 1 or keys.numel() <= FLASH_ELEMENTS
    reason = None
    if impl == "flash" or (fits and impl == "auto"):
        reason = flash.obstacle(inputs, values, layout)
        fits = reason is None
    if impl == "flash" and reason is not None:
        problem = f"the implementation 'flash' cannot be used {reason}"
        raise wrong("impl", problem, "Set impl='auto' to choose an implementation automatically")
    attend = implementation(
        "ragged_attention",
        impl,
        inputs.queries,
        _IN_TORCH,
        fitting="flash" if fits else "blocked",
        kernels="snapkv.ops.ragged.triton",
        obstacle=lambda: kernel_obstacle(inputs),
    )
    return attend(inputs, keys, values, layout)


def kernel_obstacle(inputs: TailInputs) -> str | None:
    """Return the reason why the kernels cannot be used with these inputs, or None if they can."""
    if inputs.own_visible is not None:
        return "for a tree of candidates, whose branches it cannot hide from each other"
    return triton_obstacle(inputs.queries)
