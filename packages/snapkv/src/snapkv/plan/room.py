"""Whether a model's weights can be in a device's memory at all, asked before they are read."""

from typing import Any

import torch

from snapkv.errors import OutOfMemoryError
from snapkv.plan import device_memory
from snapkv.plan.shapes import SHAPES
from snapkv.plan.weights import is_counted, quantization_of, stored_bytes
from snapkv.validation import format_bytes

_WIDTH = torch.bfloat16.itemsize
_SHARE = 0.8
"""Of the memory, what weights may take for a model to be named; the rest is for prompts."""


def require_room(name: str, outline: Any, device: torch.device) -> None:
    """Raise where the weights are larger than all the memory of the device.

    Weights in a quantization whose bytes are not counted pass, and devices that do not say what
    they have.

    Args:
        name: of the model, as it was asked for.
        outline: it on the meta device, in the dtype of its weights.
        device: where they would go.

    Raises:
        OutOfMemoryError: they do not fit; the message says which published model would.
    """
    total = device_memory.total_bytes(device)
    needed = sum(stored_bytes(outline).values())
    if total is None or needed <= total or not is_counted(quantization_of(outline.config)):
        return
    dtype = str(outline.dtype).removeprefix("torch.")
    raise OutOfMemoryError(
        f"model: expected weights of at most {format_bytes(total)}, which is the memory of "
        f"{device}, got {format_bytes(needed)} in {dtype} of {name}, none of which was read; "
        f"{_what_fits(outline, needed, total)}choose a smaller model or another device"
    )


def _what_fits(outline: Any, needed: int, total: int) -> str:
    """Another dtype, or the largest published model that fits in bfloat16; nothing if none does."""
    room = int(total * _SHARE)
    if needed * _WIDTH <= room * outline.dtype.itemsize:
        return "with dtype bfloat16 it would fit; pass that, or "
    fitting = [shape for shape in SHAPES.values() if shape.parameters * _WIDTH <= room]
    if not fitting:
        return ""
    largest = max(fitting, key=lambda shape: shape.parameters)
    takes = format_bytes(largest.parameters * _WIDTH)
    return f"{largest.repository} would fit, with {takes} in bfloat16; "
