"""Numbers that the host has worked out, on the device, which is not waited for."""

from typing import Any

import torch
from torch import Tensor


def on_device(numbers: Any, device: torch.device) -> Tensor:
    """An int64 tensor of nested lists of whole numbers; `torch.tensor` would wait for a GPU."""
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)
