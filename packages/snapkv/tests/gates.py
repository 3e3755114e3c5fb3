"""KVzap gates with random weights, in the sizes that a test needs."""

import torch

from snapkv.policies.gate import Gate, feature_count


def drawn_gate(layers=4, heads=2, size=8, *, seed=0, model=""):
    """A gate whose keys and values are of one size."""
    source = torch.Generator().manual_seed(seed)
    weights = torch.randn(layers, heads, feature_count(size, size), generator=source)
    return Gate.of(weights, size, size, model)
