"""The votes and their fading, each by the named or the fitting implementation."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from snapkv.ops.choice import implementation, triton_obstacle
from snapkv.ops.scores import AttentionStates
from snapkv.ops.votes import blocked, by_head, largest, reference
from snapkv.ops.votes.reference import Lift

Implementation = Literal["auto", "reference", "blocked", "by_head", "scan", "triton"]

MOST_HEAD_DIM = 256
"""The widest keys that the kernels take; wider rows do not fit into shared memory beside the
queries."""

MOST_FLOAT32_DIM = 128
"""The widest float32 keys that the kernel of the largest votes takes."""

_IN_TORCH: dict[str, dict[str, Callable[..., Any]]] = {
    "window_votes": {
        "reference": reference.window_votes,
        "blocked": blocked.window_votes,
        "by_head": by_head.window_votes,
    },
    "largest_votes": {
        "reference": reference.largest_votes,
        "blocked": largest.largest_votes,
        "by_head": largest.largest_votes,
    },
    "fade_votes": {"reference": reference.fade_votes, "scan": blocked.fade_votes},
}

_KERNELS = {
    "window_votes": "snapkv.ops.votes.triton",
    "largest_votes": "snapkv.ops.votes.triton_largest",
    "fade_votes": "snapkv.ops.votes.triton",
}


def window_votes(
    states: AttentionStates, *, group_reduce: str = "none", impl: Implementation = "auto"
) -> Tensor:
    """Compute the attention that each position of the prefix receives from the window.

    The attention is summed over the queries of the observation window (Eq. 2).

    Args:
        states: the last W queries of the prompt and all T keys of it.
        group_reduce: how the query heads of a KV head are combined, as in `reduce_group`.
        impl: "reference"; "blocked", which holds one block of scores at a time; "by_head", the
            faster one for half precision; "triton", kernels for CUDA that hold no scores. "auto"
            takes the kernels if they can run, else "blocked".

    Returns:
        (B, Hkv, P) float32; (B, Hq, P) for "none".

    Raises:
        InvalidArgumentError: `impl` is unknown or cannot run here.
    """
    vote = _implementation("window_votes", impl, states.keys, "blocked")
    votes: Tensor = vote(states, group_reduce=group_reduce)
    return votes


def largest_votes(
    states: AttentionStates,
    lift: Lift,
    *,
    prefix_tokens: int,
    sink_tokens: int = 0,
    group_reduce: str = "none",
    impl: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute the largest attention weight that each position receives from any of the queries.

    The weights of every query are pooled by themselves before they are compared, and scaled back to
    their own sum, so that pooling gives no query more weight in total.

    Args:
        states: as in `window_votes`.
        lift: how a query's weights are pooled along the prefix.
        prefix_tokens: how many of the first positions are voted on.
        sink_tokens: first tokens of each row whose weights are not pooled and raise no others.
        group_reduce: as in `window_votes`.
        impl: "reference"; "blocked", which holds the weights of a few heads or queries; "triton",
            kernels for CUDA that hold no weights, for a `Fading` lift. "auto" as in `window_votes`.

    Returns:
        The largest weights, in [0, 1] except for "sum"; and the sums of the weights before pooling,
        as `window_votes` returns them. Both (B, Hkv, prefix_tokens) float32; (B, Hq, prefix_tokens)
        for "none". Without gradients.

    Raises:
        InvalidArgumentError: `impl` is unknown or cannot run here.
    """
    vote = _implementation("largest_votes", impl, states.keys, "blocked", lift)
    votes: tuple[Tensor, Tensor] = vote(
        states,
        lift,
        prefix_tokens=prefix_tokens,
        sink_tokens=sink_tokens,
        group_reduce=group_reduce,
    )
    return votes


def fade_votes(votes: Tensor, decay: float, *, impl: Implementation = "auto") -> Tensor:
    """Increase the votes of the positions that follow a position with many votes.

    See `snapkv.ops.votes.reference.fade_votes`.

    Args:
        votes: (B, H, P) float32.
        decay: the factor per position, in (0, 1).
        impl: "reference", a loop; "scan", doubling steps; "triton", one pass. "auto" takes the
            kernel if it can run, else "scan".

    Returns:
        A new tensor in the shape of `votes`.

    Raises:
        InvalidArgumentError: `impl` is unknown or cannot run here.
    """
    faded: Tensor = _implementation("fade_votes", impl, votes, "scan")(votes, decay)
    return faded


def _implementation(
    operation: str, impl: str, states: Tensor, fitting: str, lift: Lift | None = None
) -> Callable[..., Any]:
    return implementation(
        operation,
        impl,
        states,
        _IN_TORCH[operation],
        fitting=fitting,
        kernels=_KERNELS[operation],
        obstacle=lambda: _obstacle(operation, states, lift),
    )


def _obstacle(operation: str, states: Tensor, lift: Lift | None = None) -> str | None:
    if lift is not None and not hasattr(lift, "decay"):
        return "for pooled largest votes, only for those that fade"
    if lift is not None and states.dtype == torch.float32 and states.shape[-1] > MOST_FLOAT32_DIM:
        most = f"more than {MOST_FLOAT32_DIM} channels"
        return f"with float32 heads of {most}, which fill its registers"
    if operation != "fade_votes" and states.shape[-1] > MOST_HEAD_DIM:
        return f"with a head_dim of {states.shape[-1]}, over {MOST_HEAD_DIM}"
    return triton_obstacle(states)
