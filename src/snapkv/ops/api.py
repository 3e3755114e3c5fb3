"""Which implementation of an operation runs: by name, or by what the tensors are."""

from typing import Any, Literal

from torch import Tensor

from snapkv.errors import InvalidArgumentError
from snapkv.ops import blocked, reference

Implementation = Literal["auto", "reference", "blocked"]

_IMPLEMENTATIONS = {"reference": reference.window_votes, "blocked": blocked.window_votes}


def window_votes(
    queries: Tensor, keys: Tensor, *, impl: Implementation = "auto", **options: Any
) -> Tensor:
    """How much attention each prefix position receives from the observation window (Eq. 2).

    Args:
        queries: (B, Hq, W, D), the last W queries of the prompt, after rotary embedding.
        keys: (B, Hkv, T, D), all keys of the prompt, after rotary embedding.
        impl: "reference"; "blocked", which holds no more than a block of scores; "auto" takes the
            reference for prompts of one block.
        options: as in `snapkv.ops.reference.window_votes`.

    Returns:
        (B, Hq, P) float32.

    Raises:
        InvalidArgumentError: an unknown implementation.
    """
    if impl == "auto":
        impl = "reference" if keys.shape[2] <= blocked.BLOCK_TOKENS else "blocked"
    if impl not in _IMPLEMENTATIONS:
        raise InvalidArgumentError(
            f"impl: expected auto or one of {', '.join(_IMPLEMENTATIONS)}, got {impl!r}"
        )
    return _IMPLEMENTATIONS[impl](queries, keys, **options)
