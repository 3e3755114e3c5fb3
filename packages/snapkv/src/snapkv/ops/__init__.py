"""Votes, pooling, top-k selection and gathering, and attention to ragged or coded heads."""

from snapkv.ops.codes.api import coded_attention
from snapkv.ops.codes.coding import Codes, encode_all
from snapkv.ops.codes.layout import BlockLayout
from snapkv.ops.numbers import on_device
from snapkv.ops.ragged.api import ragged_attention
from snapkv.ops.ragged.inputs import TailInputs
from snapkv.ops.ragged.layout import RaggedLayout
from snapkv.ops.redundancy import redundancy
from snapkv.ops.scores import AttentionStates, ScoreOptions, scoring
from snapkv.ops.votes.api import Implementation, fade_votes, largest_votes, window_votes
from snapkv.ops.votes.blocked import flat_rows, gather_pair, gather_tokens
from snapkv.ops.votes.lifts import Fading, Pooling
from snapkv.ops.votes.reference import (
    Lift,
    attention_of_groups,
    attention_received,
    attention_received_by_distance,
    attention_to_stored,
    attention_weight_blocks,
    attention_weights,
    count_above,
    pool_votes,
    reduce_group,
    window_visibility,
)
from snapkv.ops.votes.top_k import fill_first, keep_best, kept_indices, mask_best
from snapkv.token_cost import TokenCost

__all__ = [
    "AttentionStates",
    "BlockLayout",
    "Codes",
    "Fading",
    "Implementation",
    "Lift",
    "Pooling",
    "RaggedLayout",
    "ScoreOptions",
    "TailInputs",
    "TokenCost",
    "attention_of_groups",
    "attention_received",
    "attention_received_by_distance",
    "attention_to_stored",
    "attention_weight_blocks",
    "attention_weights",
    "mask_best",
    "coded_attention",
    "encode_all",
    "fade_votes",
    "fill_first",
    "flat_rows",
    "gather_pair",
    "gather_tokens",
    "keep_best",
    "kept_indices",
    "largest_votes",
    "on_device",
    "pool_votes",
    "ragged_attention",
    "reduce_group",
    "redundancy",
    "scoring",
    "count_above",
    "window_visibility",
    "window_votes",
]
