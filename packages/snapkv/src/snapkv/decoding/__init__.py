"""Several tokens per forward pass: Medusa heads."""

from snapkv.decoding.heads import MedusaHeads, load_heads, save_heads
from snapkv.decoding.medusa import Medusa
from snapkv.decoding.tree import CandidateTree

__all__ = [
    "CandidateTree",
    "Medusa",
    "MedusaHeads",
    "load_heads",
    "save_heads",
]
