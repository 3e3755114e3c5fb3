"""Which implementation of an operation runs: by name, or by what the tensors are."""

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from snapkv.errors import InvalidArgumentError
from snapkv.ops import blocked, reference, triton_support

Implementation = Literal["auto", "reference", "blocked", "triton"]

_VOTES = {"reference": reference.window_votes, "blocked": blocked.window_votes}
_POOLING = {"reference": reference.pool_votes}
_GATHERING = {"reference": reference.gather_tokens}


def window_votes(
    queries: Tensor,
    keys: Tensor,
    *,
    group_reduce: str = "none",
    impl: Implementation = "auto",
    **options: Any,
) -> Tensor:
    """How much attention each prefix position receives from the observation window (Eq. 2).

    Args:
        queries: (B, Hq, W, D), the last W queries of the prompt, after rotary embedding.
        keys: (B, Hkv, T, D), all keys of the prompt, after rotary embedding.
        group_reduce: how the query heads of a KV head are combined, as in `reduce_group`.
        impl: "reference"; "blocked", which holds no more than a block of scores; "triton", kernels
            for CUDA that hold none. "auto" takes the kernels where they can run, else "blocked".
        options: as in `snapkv.ops.reference.window_votes`.

    Returns:
        (B, Hkv, P) float32; (B, Hq, P) for "none".

    Raises:
        InvalidArgumentError: an unknown implementation, or one that cannot run here.
    """
    vote = _implementation("window_votes", impl, keys, _VOTES, "blocked")
    return vote(queries, keys, group_reduce=group_reduce, **options)


def pool_votes(
    votes: Tensor, kernel_size: int, pooling: str, *, impl: Implementation = "auto"
) -> Tensor:
    """Smooth votes along the prefix, as `snapkv.ops.reference.pool_votes` says.

    Args:
        votes: (B, H, P) float32.
        kernel_size: odd; 1 leaves the votes unchanged.
        pooling: "max" or "avg".
        impl: "reference", "triton", or "auto" as in `window_votes`.

    Raises:
        InvalidArgumentError: an unknown implementation, or one that cannot run here.
    """
    pool = _implementation("pool_votes", impl, votes, _POOLING, "reference")
    return pool(votes, kernel_size, pooling)


def gather_tokens(states: Tensor, keep_indices: Tensor, *, impl: Implementation = "auto") -> Tensor:
    """Copy the kept rows of keys or values, as `snapkv.ops.reference.gather_tokens` says.

    Args:
        states: (B, Hs, T, D), any dtype.
        keep_indices: (B, H, K); entries of -1 stand for any row.
        impl: "reference", "triton", or "auto" as in `window_votes`.

    Raises:
        InvalidArgumentError: an unknown implementation, or one that cannot run here.
    """
    gather = _implementation("gather_tokens", impl, states, _GATHERING, "reference")
    return gather(states, keep_indices)


def _implementation(
    operation: str,
    impl: str,
    states: Tensor,
    in_torch: dict[str, Callable[..., Tensor]],
    fitting: str,
) -> Callable[..., Tensor]:
    """The implementation of that name; for "auto" the kernel, or what fits in torch."""
    if impl == "auto":
        impl = "triton" if states.is_cuda and _obstacle(operation, states) is None else fitting
        triton_support.say_once(operation, impl, states.device.type)
    if impl in in_torch:
        return in_torch[impl]
    if impl != "triton":
        raise InvalidArgumentError(
            f"impl: expected auto or one of {', '.join(in_torch)}, triton, got {impl!r}; auto "
            "picks one"
        )
    reason = _obstacle(operation, states)
    if reason is not None:
        raise InvalidArgumentError(
            f"impl: expected one that can run here, got 'triton' {reason}; pass impl='auto'"
        )
    from snapkv.ops import triton_votes

    kernel: Callable[..., Tensor] = getattr(triton_votes, operation)
    return kernel


def _obstacle(operation: str, states: Tensor) -> str | None:
    if operation == "window_votes" and states.shape[-1] > triton_support.MOST_HEAD_DIM:
        return f"with a head_dim of {states.shape[-1]}, over {triton_support.MOST_HEAD_DIM}"
    return triton_support.obstacle(states)
