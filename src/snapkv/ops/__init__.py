"""Window votes, pooling, group reduce, top-k and gather."""

from snapkv.ops.api import gather_tokens, pool_votes, window_votes
from snapkv.ops.ragged import ragged_attention
from snapkv.ops.ragged_layout import RaggedLayout
from snapkv.ops.reference import (
    attention_received,
    attention_received_by_distance,
    attention_to_stored,
    attention_weights,
    keep_best,
    kept_indices,
    reduce_group,
    times_above,
    window_visibility,
)

__all__ = [
    "RaggedLayout",
    "attention_received",
    "attention_received_by_distance",
    "attention_to_stored",
    "attention_weights",
    "gather_tokens",
    "keep_best",
    "kept_indices",
    "pool_votes",
    "ragged_attention",
    "reduce_group",
    "times_above",
    "window_visibility",
    "window_votes",
]
