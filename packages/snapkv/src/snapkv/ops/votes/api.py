"""The vote, its pooling and the gather, each by the implementation that is asked for or fits."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from snapkv.ops.choice import implementation, triton_obstacle
from snapkv.ops.scores import ScoreOptions
from snapkv.ops.votes import blocked, by_head, by_token, reference, scan

Implementation = Literal["auto", "reference", "blocked", "by_head", "by_token", "scan", "triton"]

MOST_HEAD_DIM = 256
"""Wider rows of keys do not fit beside the queries into the memory of a multiprocessor."""

_VOTES = {
    "reference": reference.window_votes,
    "blocked": blocked.window_votes,
    "by_head": by_head.window_votes,
}
_POOLING = {"reference": reference.pool_votes}
_FADING = {"reference": reference.fade_votes, "scan": scan.fade_votes}
_GATHERING = {"reference": reference.gather_tokens, "by_token": by_token.gather_tokens}


def window_votes(
    queries: Tensor,
    keys: Tensor,
    score_options: ScoreOptions,
    *,
    pad_tokens: Tensor | None = None,
    group_reduce: str = "none",
    impl: Implementation = "auto",
) -> Tensor:
    """How much attention each prefix position receives from the observation window (Eq. 2).

    Args:
        queries: (B, Hq, W, D), the last W queries of the prompt, after rotary embedding.
        keys: (B, Hkv, T, D), all keys of the prompt, after rotary embedding.
        score_options: what the model's attention does to its scores.
        pad_tokens: (B,), leading pads of each row; pads neither vote nor receive votes.
        group_reduce: how the query heads of a KV head are combined, as in `reduce_group`.
        impl: "reference"; "blocked", which holds no more than a block of scores; "by_head", the
            quicker for half precision; "triton", kernels for CUDA that hold no scores. "auto" takes
            the kernels where they can run, else "blocked".

    Returns:
        (B, Hkv, P) float32; (B, Hq, P) for "none".

    Raises:
        InvalidArgumentError: an unknown implementation, or one that cannot run here.
    """
    vote = _implementation("window_votes", impl, keys, _VOTES, "blocked")
    return vote(queries, keys, score_options, pad_tokens=pad_tokens, group_reduce=group_reduce)


def pool_votes(
    votes: Tensor,
    kernel_size: int | tuple[int, int],
    pooling: str,
    *,
    impl: Implementation = "auto",
) -> Tensor:
    """Smooth votes along the prefix, as `snapkv.ops.votes.reference.pool_votes` says.

    Raises:
        InvalidArgumentError: an unknown implementation, or one that cannot run here.
    """
    pool = _implementation("pool_votes", impl, votes, _POOLING)
    return pool(votes, kernel_size, pooling)


def fade_votes(votes: Tensor, decay: float, *, impl: Implementation = "auto") -> Tensor:
    """Let votes lift what follows them, as `snapkv.ops.votes.reference.fade_votes` says.

    Args:
        votes: (B, H, P) float32.
        decay: the factor per position, in (0, 1).
        impl: "reference", a loop; "scan", doubling steps; "triton", one pass. "auto" takes the
            kernel where it can run, else "scan".

    Raises:
        InvalidArgumentError: an unknown implementation, or one that cannot run here.
    """
    fade = _implementation("fade_votes", impl, votes, _FADING, "scan")
    return fade(votes, decay)


def gather_tokens(states: Tensor, keep_indices: Tensor, *, impl: Implementation = "auto") -> Tensor:
    """Copy the kept rows of keys or values, as `snapkv.ops.votes.reference.gather_tokens` says.

    Args:
        states: (B, Hs, T, D), any dtype.
        keep_indices: (B, H, K), -1 for any row.
        impl: "reference", number by number; "by_token", one copy per token; "triton", a kernel.
            "auto" takes the kernel where it can run, else "by_token".

    Raises:
        InvalidArgumentError: an unknown implementation, or one that cannot run here.
    """
    gather = _implementation("gather_tokens", impl, states, _GATHERING, "by_token")
    return gather(states, keep_indices)


def _implementation(
    operation: str,
    impl: str,
    states: Tensor,
    in_torch: dict[str, Callable[..., Tensor]],
    fitting: str = "reference",
) -> Callable[..., Tensor]:
    return implementation(
        operation,
        impl,
        states,
        in_torch,
        fitting=fitting,
        kernels="snapkv.ops.votes.triton",
        obstacle=lambda: _obstacle(operation, states),
    )


def _obstacle(operation: str, states: Tensor) -> str | None:
    if operation == "window_votes" and states.shape[-1] > MOST_HEAD_DIM:
        return f"with a head_dim of {states.shape[-1]}, over {MOST_HEAD_DIM}"
    return triton_obstacle(states)
