"""Window votes, pooling, group reduce, top-k and gather."""

from snapkv.ops.ragged import ragged_attention
from snapkv.ops.reference import (
    attention_received,
    attention_weights,
    gather_tokens,
    keep_best,
    pool_votes,
    reduce_group,
    times_above,
    window_visibility,
    window_votes,
)

__all__ = [
    "attention_received",
    "attention_weights",
    "gather_tokens",
    "keep_best",
    "pool_votes",
    "ragged_attention",
    "reduce_group",
    "times_above",
    "window_visibility",
    "window_votes",
]
