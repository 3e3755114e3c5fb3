"""Which implementation of an operation runs: by name, or by what the tensors are."""

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from snapkv.errors import InvalidArgumentError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether triton runs kernels in its interpreter, on any device, slowly: for tests."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LEAST_CAPABILITY = 8, 0
"""Of a GPU; older ones have less memory in a multiprocessor than the kernels take."""

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
    """The implementation of that name; for "auto" the kernel, or the `fitting` one in torch.

    `kernels` is the module of the kernel, imported only where that is to run; `obstacle` says why
    it cannot, or None.
    """
    if impl == "auto":
        impl = "triton" if states.is_cuda and obstacle() is None else fitting
        say_once(operation, impl, states.device.type)
    if impl in in_torch:
        return in_torch[impl]
    if impl != "triton":
        raise InvalidArgumentError(
            f"impl: expected auto or one of {', '.join(in_torch)}, triton, got {impl!r}; auto "
            "picks one"
        )
    if (reason := obstacle()) is not None:
        raise InvalidArgumentError(
            f"impl: expected one that can run here, got 'triton' {reason}; pass impl='auto'"
        )
    kernel: Callable[..., _Result] = getattr(importlib.import_module(kernels), operation)
    return kernel


def triton_obstacle(states: Tensor) -> str | None:
    """Why a kernel cannot run on these keys, values or queries, or None."""
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
