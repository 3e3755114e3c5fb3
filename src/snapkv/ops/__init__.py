"""Window votes, pooling, group reduce, top-k and gather."""

from snapkv.ops.reference import (
    gather_tokens,
    keep_best,
    pool_votes,
    reduce_group,
    window_visibility,
    window_votes,
)

__all__ = [
    "gather_tokens",
    "keep_best",
    "pool_votes",
    "reduce_group",
    "window_visibility",
    "window_votes",
]
