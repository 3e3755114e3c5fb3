"""The votes and their fading, each by the implementation that is asked for or fits."""

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
"""Wider rows of keys do not fit with the queries into the memory of a multiprocessor."""

MOST_FLOAT32_DIM = 128
"""The same of float32 and of the largest votes."""

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
    """How much attention each prefix position receives from the observation window (Eq. 2).

    Args:
        states: the last W queries of the prompt and all T keys of it.
        group_reduce: how the query heads of a KV head are combined, as in `reduce_group`.
        impl: "reference"; "blocked", which holds no more than a block of scores; "by_head", the
            quicker for half precision; "triton", kernels for CUDA that hold no scores. "auto" takes
            the kernels where they can run, else "blocked".

    Returns:
        (B, Hkv, P) float32; (B, Hq, P) for "none".

    Raises:
        InvalidArgumentError: an unknown implementation, or one that cannot run here.
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
    """The largest attention weight that a position receives from a query of the window, lifted.

    The weights of every query are lifted by themselves and scaled back to their own sum, so that
    no query has more to give for being lifted.

    Args:
        states: as in `window_votes`.
        lift: what becomes of a query's weights along the prefix.
        prefix_tokens: the first positions, which are voted on.
        sink_tokens: first tokens of each row whose weights stay as they are, and lift none.
        group_reduce: as in `window_votes`.
        impl: "reference"; "blocked", which holds the weights of a few heads or queries; "triton",
            kernels for CUDA that hold none, of a `Fading` lift.

    Returns:
        The largest, in [0, 1], but for the "sum" of a group; and their sum before they are lifted,
        as `window_votes` gives it. Both (B, Hkv, prefix_tokens) float32; (B, Hq, prefix_tokens) for
        "none". Without gradients.

    Raises:
        InvalidArgumentError: an unknown implementation, or one that cannot run here.
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
    """Let votes lift what follows them, as `snapkv.ops.votes.reference.fade_votes` says.

    `impl` is "reference", a loop; "scan", doubling steps; "triton", one pass. "auto" takes the
    kernel where it can run, else "scan".
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
