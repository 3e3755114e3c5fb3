"""Several tokens per forward pass: Medusa heads, and drafts by the compressed cache itself."""

from snapkv.decoding.heads import MedusaHeads, load_heads, save_heads
from snapkv.decoding.medusa import Medusa
from snapkv.decoding.self_speculation import SelfSpeculation
from snapkv.decoding.speculation import Speculation, Tally
from snapkv.decoding.tree import CandidateTree, accept_greedily, accept_sampled, accept_typically

__all__ = [
    "CandidateTree",
    "Medusa",
    "MedusaHeads",
    "SelfSpeculation",
    "Speculation",
    "Tally",
    "accept_greedily",
    "accept_sampled",
    "accept_typically",
    "load_heads",
    "save_heads",
]
