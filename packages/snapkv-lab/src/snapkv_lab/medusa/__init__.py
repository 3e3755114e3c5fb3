"""Medusa: heads that draft several tokens, which one forward pass verifies."""

from snapkv_lab.medusa.generating import Medusa
from snapkv_lab.medusa.heads import MedusaHeads, load_heads, save_heads
from snapkv_lab.medusa.tree import CandidateTree

__all__ = [
    "CandidateTree",
    "Medusa",
    "MedusaHeads",
    "load_heads",
    "save_heads",
]
