"""Optional packages: what to run where one is missing, as the installed package itself says."""

import importlib.metadata
import re

from snapkv.errors import MissingDependencyError


def missing(purpose: str, *packages: str) -> MissingDependencyError:
    """The error that says which packages something needs and how they come.

    Args:
        purpose: the argument and what was to be done: "plot: drawing figures".
        packages: names under which pip knows them, all of them optional ones of this package.
    """
    named = " and ".join(packages)
    return MissingDependencyError(
        f"{purpose} needs the package {named}, which is not installed; run "
        f"{install_command(*packages)}"
    )


def install_command(*packages: str) -> str:
    """What installs them, in the releases that this package asks for.

    It names the packages and not an extra of this one, which pip finds in no index.
    """
    asked = _asked_for()
    wanted = [asked.get(_normal(package), package) for package in packages]
    return "pip install " + " ".join(f"'{each}'" for each in wanted)


def _asked_for() -> dict[str, str]:
    """Requirements by the names of their packages; none where only the source tree is there."""
    try:
        lines = importlib.metadata.requires("snapkv") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found: dict[str, str] = {}
    for line in lines:
        requirement = line.partition(";")[0].strip()
        name = re.match(r"[\w.-]+", requirement)
        if name is not None:
            found.setdefault(_normal(name[0]), requirement)
    return found


def _normal(name: str) -> str:
    """A name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()
