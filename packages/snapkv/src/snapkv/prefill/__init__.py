"""Reading prompts beyond what one forward pass can hold, or sooner than one would."""

from snapkv.prefill.layers import layer_by_layer
from snapkv.prefill.selective import selective
from snapkv.prefill.shared import SharedReading

__all__ = ["SharedReading", "layer_by_layer", "selective"]
