"""Estimate the memory of a model, its prompt and its cache, what fits, and the gain in speed.

Importing this file loads no torch. `snapkv_app.plan.advice`, which explains what does not fit on a
device, needs it.
"""

from snapkv_app.plan.cards import card_bytes
from snapkv_app.plan.costs import Request
from snapkv_app.plan.footprint import Footprint, footprint_of
from snapkv_app.plan.planner import CacheNeeds, Plan, plan

__all__ = ["CacheNeeds", "Footprint", "Plan", "Request", "card_bytes", "footprint_of", "plan"]
