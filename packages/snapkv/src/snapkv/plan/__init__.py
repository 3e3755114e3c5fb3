"""Estimate the memory of a model, its prompt and its cache, what fits, and the gain in speed.

Importing this file loads no torch. `snapkv.plan.advice` and `snapkv.plan.device_memory` need it:
they explain what does not fit on a device.
"""

from snapkv.plan.cards import card_bytes
from snapkv.plan.costs import Request
from snapkv.plan.footprint import Footprint, footprint_of
from snapkv.plan.planner import CacheNeeds, Plan, plan

__all__ = ["CacheNeeds", "Footprint", "Plan", "Request", "card_bytes", "footprint_of", "plan"]
