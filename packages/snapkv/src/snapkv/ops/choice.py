"""Which implementation of an operation runs: the named one, or the one that fits the tensors."""

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from snapkv.errors import wrong

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether triton runs kernels in its interpreter, on any device and slowly, for tests."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LEAST_CAPABILITY = 8, 0
"""The lowest compute capability of a GPU; older GPUs have less shared memory than the kernels
need."""

_Result = TypeVar("_Result")
_log = logging.getLogger("snapkv.ops")


def implementation(
    operation: str,
    impl: str,
    states: Tensor,
    in_torch: Mapping[str, Callable[..., _Result]],
    *,
    fitting: str,
    kernels: str,
    obstacle: Callable[[], str | None],
) -> Callable[..., _Result]:
    """Return the function that implements an operation.

    Args:
        operation: name of the operation, which is also the kernel's name in its module.
        impl: "auto", "triton" or a key of `in_torch`. "auto" takes the kernel if it can run, else
            `fitting`, and logs the choice once.
        states: a tensor of the call, whose device decides for "auto".
        in_torch: the implementations in torch by name.
        fitting: the key of `in_torch` for "auto" if the kernel cannot run.
        kernels: the module of the kernel, imported only if the kernel is to run.
        obstacle: returns why the kernel cannot run, or None.

    Raises:
        InvalidArgumentError: `impl` is unknown, or is "triton" and the kernel cannot run here.
    """
    if impl == "auto":
        impl = "triton" if states.is_cuda and obstacle() is None else fitting
        log_choice(operation, impl, states.device.type)
    if impl in in_torch:
        return in_torch[impl]
    if impl != "triton":
        problem = f"expected auto or one of {', '.join(in_torch)} or triton, but got {impl!r}"
        raise wrong("impl", problem, "Set impl='auto' to choose an implementation automatically")
    if (reason := obstacle()) is not None:
        problem = f"the implementation 'triton' cannot be used {reason}"
        raise wrong("impl", problem, "Set impl='auto' to choose an implementation automatically")
    kernel: Callable[..., _Result] = getattr(importlib.import_module(kernels), operation)
    return kernel


def triton_obstacle(states: Tensor) -> str | None:
    """Return the reason why a kernel cannot be used with these tensors, or None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "because the package triton is not installed"
    if not states.is_cuda and not INTERPRETED:
        return f"with tensors on the device {states.device.type}"
    if states.is_cuda and _capability(states.device) < LEAST_CAPABILITY:
        return "on a GPU with a compute capability below 8.0"
    if states.requires_grad and torch.is_grad_enabled():
        return "with gradients, because it does not compute them"
    if states.dtype not in DTYPES:
        return f"with tensors of the type {states.dtype}"
    return None


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def log_choice(operation: str, impl: str, device: str) -> None:
    """Log which implementation has been chosen, but only once for each device."""
    _log.info("%s on %s: impl='auto' chose %r", operation, device, impl)
