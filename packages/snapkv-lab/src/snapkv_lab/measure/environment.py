"""With what a number was measured: part of every row."""

import platform
from pathlib import Path
from typing import Any

import torch
import transformers

import snapkv


def software_versions() -> dict[str, Any]:
    """Of the software that a result depends on."""
    return {
        "snapkv": snapkv.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def describe_device(device: torch.device) -> dict[str, Any]:
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
    """The processor's name where Linux tells it, else its architecture; and torch's instructions.

    Names such as "AMD EPYC" are of machines with and without AVX-512.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.machine())} ({torch.backends.cpu.get_cpu_capability()})"
