"""Copy numbers that the host has computed to the device without waiting for it."""

from typing import Any

import torch
from torch import Tensor


def on_device(numbers: Any, device: torch.device) -> Tensor:
    """Copy integers to the device without waiting for a GPU.

    Args:
        numbers: an integer, or lists of integers, which may be nested.
        device: where the result is made.

    Returns:
        An int64 tensor, whose shape is that of the nested lists.
    """
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)
