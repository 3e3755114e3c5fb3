"""Estimate the memory of a model, its prompt and its cache, what fits, and the gain in speed."""

from snapkv.plan.advice import (
    layerwise_advice,
    prompt_advice,
    prompt_memory_explained,
    require_room,
    weights_advice,
)
from snapkv.plan.device_memory import free_bytes, out_of_memory_explained
from snapkv.plan.footprint import (
    Footprint,
    footprint_of,
    is_counted,
    max_positions,
    weights_bytes,
)
from snapkv.plan.kept import token_costs
from snapkv.plan.planner import CacheNeeds, Plan, Request, verdict

__all__ = [
    "CacheNeeds",
    "Footprint",
    "Plan",
    "Request",
    "footprint_of",
    "free_bytes",
    "is_counted",
    "layerwise_advice",
    "max_positions",
    "out_of_memory_explained",
    "prompt_advice",
    "prompt_memory_explained",
    "require_room",
    "token_costs",
    "verdict",
    "weights_advice",
    "weights_bytes",
]
