"""Reading prompts beyond what one forward pass can hold."""

from snapkv.prefill.layers import layer_by_layer
from snapkv.prefill.shared import SharedReading

__all__ = ["SharedReading", "layer_by_layer"]
