"""What to keep: one file per method."""

from snapkv.policies.base import Policy, PrefixPolicy, PromptLayer, Selection
from snapkv.policies.full import FullCache
from snapkv.policies.random import Random
from snapkv.policies.snapkv import SnapKV

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (SnapKV, FullCache, Random)}
"""Every method by the name it has on the command line."""

__all__ = [
    "POLICIES",
    "FullCache",
    "Policy",
    "PrefixPolicy",
    "PromptLayer",
    "Random",
    "Selection",
    "SnapKV",
]
