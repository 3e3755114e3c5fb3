"""Attention to heads that hold different numbers of tokens (varlen): what runs where."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from snapkv.errors import InvalidArgumentError
from snapkv.ops import ragged_blocked, ragged_grouped, ragged_reference
from snapkv.ops.ragged_layout import RaggedLayout
from snapkv.ops.triton_support import obstacle, say_once

RaggedImplementation = Literal["auto", "reference", "grouped", "blocked", "triton"]

GROUPED_ELEMENTS = 2**18
"""On a CPU, layers with no more elements of keys than this take a product per head."""

_IN_TORCH: dict[str, Callable[..., Tensor]] = {
    "reference": ragged_reference.ragged_attention,
    "grouped": ragged_grouped.ragged_attention,
    "blocked": ragged_blocked.ragged_attention,
}


def ragged_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: RaggedLayout,
    tail_keys: Tensor,
    tail_values: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    own_visible: Tensor | None = None,
    impl: RaggedImplementation = "auto",
) -> Tensor:
    """Varlen attention of the last Q tokens: to what their head keeps and to the common tail.

    Args:
        queries: (B, Hq, Q, D).
        keys: (N, D), what the heads keep, all of it in the past; rows first, then heads.
        values: (N, Dv).
        layout: how many of the N belong to each row's each head.
        tail_keys: (B, H, S, D), the append buffer: the tokens behind; the last Q are the queries'
            own, each of which sees itself and what came before.
        tail_values: (B, H, S, Dv).
        scaling: factor on the scores.
        softcap: cap on the scaled scores, or None.
        sinks: (Hq,) extra logits of the softmax, or None.
        own_visible: (Q, Q) bool, lower triangular: which of the queries' own tokens each of them
            sees, where they are a tree of candidates; None for itself and those before it.
        impl: "reference", the plain definition; "grouped", one matrix product per head; "blocked",
            a few products for all heads; "triton", a kernel for CUDA. "auto" takes the kernel where
            it can run, else "grouped" for small layers on a CPU and "blocked" for the others.

    Returns:
        (B, Hq, Q, Dv), in the dtype of the values.

    Raises:
        InvalidArgumentError: an unknown implementation, or one that cannot run here.
    """
    return _implementation(impl, queries, keys, own_visible)(
        queries,
        keys,
        values,
        layout,
        tail_keys,
        tail_values,
        scaling=scaling,
        softcap=softcap,
        sinks=sinks,
        **({} if own_visible is None else {"own_visible": own_visible}),
    )


def _implementation(
    impl: str, queries: Tensor, keys: Tensor, own_visible: Tensor | None
) -> Callable[..., Tensor]:
    if impl == "auto":
        impl = _fitting(queries, keys, own_visible)
        say_once("ragged_attention", impl, queries.device.type)
    if impl in _IN_TORCH:
        return _IN_TORCH[impl]
    if impl != "triton":
        raise InvalidArgumentError(
            f"impl: expected auto, {', '.join(_IN_TORCH)} or triton, got {impl!r}; auto picks one"
        )
    obstacle = _obstacle(queries, own_visible)
    if obstacle is not None:
        raise InvalidArgumentError(
            f"impl: expected one that can run here, got 'triton' {obstacle}; pass impl='auto'"
        )
    from snapkv.ops import triton_ragged

    return triton_ragged.ragged_attention


def _fitting(queries: Tensor, keys: Tensor, own_visible: Tensor | None) -> str:
    if queries.is_cuda and _obstacle(queries, own_visible) is None:
        return "triton"
    # Several queries make scores that "blocked" holds for some of them at a time.
    small = keys.numel() <= GROUPED_ELEMENTS and queries.shape[2] <= 32
    return "grouped" if small and queries.device.type == "cpu" else "blocked"


def _obstacle(queries: Tensor, own_visible: Tensor | None) -> str | None:
    """Why the kernel cannot run, or None."""
    if own_visible is not None:
        return "for a tree of candidates, whose branches it cannot hide from each other"
    return obstacle(queries)
