"""Whether triton's kernels can run here, and saying once which implementation was chosen."""

import functools
import importlib.util
import logging
import os

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether triton runs kernels in its interpreter, on any device, slowly: for tests."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LEAST_CAPABILITY = 8, 0
"""Of a GPU; older ones have less memory in a multiprocessor than the kernels take."""
MOST_HEAD_DIM = 256
"""Wider rows of keys do not fit beside the queries into the memory of a multiprocessor."""

_log = logging.getLogger("snapkv.ops")


def obstacle(states: Tensor) -> str | None:
    """Why a kernel cannot run on these states, or None.

    Args:
        states: (..., D); the last axis of keys, values or queries is the head's.
    """
    if importlib.util.find_spec("triton") is None:
        return "without the package triton"
    if not states.is_cuda and not INTERPRETED:
        return f"with tensors on {states.device.type}, where it does not run"
    if states.is_cuda and _capability(states.device) < LEAST_CAPABILITY:
        return "on a GPU of an older generation than compute capability 8.0"
    if states.requires_grad and torch.is_grad_enabled():
        return "with gradients, which it does not compute"
    if states.dtype not in DTYPES:
        return f"with {states.dtype}, which it does not know"
    return None


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def say_once(operation: str, impl: str, device: str) -> None:
    """Log which implementation "auto" has chosen, the first time it does."""
    _log.info("%s on %s: impl='auto' chose %r", operation, device, impl)
