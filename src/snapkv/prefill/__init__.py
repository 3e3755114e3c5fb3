"""Reading prompts beyond what one forward pass can hold."""

from snapkv.prefill.chunks import chunked
from snapkv.prefill.layers import layer_by_layer

__all__ = ["chunked", "layer_by_layer"]
