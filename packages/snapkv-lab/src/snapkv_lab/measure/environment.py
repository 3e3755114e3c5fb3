"""A description of the software and the machine, which is part of every row."""

import platform
from pathlib import Path
from typing import Any

import torch
import transformers

import snapkv


def software_versions() -> dict[str, Any]:
    """Return the versions of the software, with the keys "snapkv", "torch", "transformers" and
    "python".
    """
    return {
        "snapkv": snapkv.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def describe_device(device: torch.device) -> dict[str, Any]:
    """Return a description of the device and the versions of the software, as one dictionary for
    JSON.

    It has the keys of `software_versions`, "processor" (the name of the GPU or of the CPU) and
    "threads" (of torch on the CPU); for CUDA also "memory_bytes", "capability" and "cuda", the
    version.
    """
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else processor_name()
    described = software_versions() | {"processor": name, "threads": torch.get_num_threads()}
    if cuda:
        properties = torch.cuda.get_device_properties(device)
        capability = f"{properties.major}.{properties.minor}"
        memory = {"memory_bytes": properties.total_memory, "capability": capability}
        described |= memory | {"cuda": torch.version.cuda}
    return described


def processor_name() -> str:
    """Return the name of the processor, followed by the instruction set that torch uses in
    parentheses, because a name such as "AMD EPYC" is shared by machines with and without AVX-512.

    On systems other than Linux, the architecture takes the place of the name.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.machine())} ({torch.backends.cpu.get_cpu_capability()})"
