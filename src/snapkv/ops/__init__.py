"""Window votes, pooling, group reduce, top-k and gather."""

from snapkv.ops.reference import (
    attention_received,
    attention_weights,
    gather_tokens,
    keep_best,
    pool_votes,
    reduce_group,
    window_visibility,
    window_votes,
)

__all__ = [
    "attention_received",
    "attention_weights",
    "gather_tokens",
    "keep_best",
    "pool_votes",
    "reduce_group",
    "window_visibility",
    "window_votes",
]
