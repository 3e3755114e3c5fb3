"""Reading prompts that do not fit into one forward pass, or that several caches share."""

from snapkv.prefill.layers import layer_by_layer
from snapkv.prefill.shared import SharedReading

__all__ = ["SharedReading", "layer_by_layer"]
