"""Several tokens per forward pass: Medusa heads."""

from snapkv.decoding.heads import MedusaHeads, load_heads, save_heads
from snapkv.decoding.medusa import Medusa
from snapkv.decoding.speculation import Tally
from snapkv.decoding.tree import CandidateTree, accept_greedily, accept_typically

__all__ = [
    "CandidateTree",
    "Medusa",
    "MedusaHeads",
    "Tally",
    "accept_greedily",
    "accept_typically",
    "load_heads",
    "save_heads",
]
