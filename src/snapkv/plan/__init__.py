"""What a model, its prompt and its cache take: what would fit, and how much faster it would be."""

from snapkv.plan.footprint import Footprint, footprint_of
from snapkv.plan.memory import (
    cache_bytes_per_token,
    chunked_advice,
    chunked_bytes,
    free_bytes,
    full_cache_bytes,
    layerwise_advice,
    layerwise_bytes,
    max_positions,
    out_of_memory_explained,
    prompt_advice,
    prompt_bytes,
    prompt_bytes_per_token,
    weights_advice,
    weights_bytes,
)
from snapkv.plan.planner import CacheNeeds, Plan, Request
from snapkv.plan.verdict import verdict

__all__ = [
    "CacheNeeds",
    "Footprint",
    "Plan",
    "Request",
    "cache_bytes_per_token",
    "chunked_advice",
    "chunked_bytes",
    "footprint_of",
    "free_bytes",
    "full_cache_bytes",
    "layerwise_advice",
    "layerwise_bytes",
    "max_positions",
    "out_of_memory_explained",
    "prompt_advice",
    "prompt_bytes",
    "prompt_bytes_per_token",
    "verdict",
    "weights_advice",
    "weights_bytes",
]
