"""Empty environments, and what is installed into them."""

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MOST_WHEEL_BYTES = 2_500_000
EXTRAS = tomllib.loads((ROOT / "packages/snapkv/pyproject.toml").read_text("utf-8"))["project"][
    "optional-dependencies"
]


class NotReleasableError(Exception):
    """What would be released does not do what it is to do."""


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel and the sdist, built into a folder.

    Raises:
        NotReleasableError: the wheel is too large, or a file that it must have is missing.
    """
    run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], ROOT)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    size = wheel.stat().st_size
    if size > MOST_WHEEL_BYTES:
        raise NotReleasableError(
            f"wheel: expected at most {MOST_WHEEL_BYTES:,} bytes, got {size:,}"
        )
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in ("snapkv/py.typed", "licenses/LICENSE", "METADATA"):
        if not any(name.endswith(wanted) for name in names):
            raise NotReleasableError(f"wheel: expected a file {wanted}, got none")
    return wheel, sdist


class Environment:
    """An empty environment of one Python, outside of the repository.

    Args:
        python: the Python that makes it.
        folder: where it will be.
        transformers: the release to hold pip to; that of `constraints.txt` by default.
    """

    def __init__(self, python: str, folder: Path, transformers: str | None = None) -> None:
        run([python, "-m", "venv", str(folder)], folder.parent)
        self.python, self.folder = folder / "bin" / "python", folder
        self._constraints = folder / "constraints.txt"
        pins = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
        if transformers is not None:
            pins = [pin for pin in pins if not pin.startswith("transformers==")]
            pins.append(f"transformers=={transformers}")
        self._constraints.write_text("\n".join(pins) + "\n", "utf-8")

    def install(self, *what: str) -> None:
        """Install by pip, with the releases that the tests know."""
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*pip, "--no-compile", "-c", str(self._constraints), *what], self.folder)

    def run(self, *command: str) -> str:
        """What a command of the environment prints; models are converted into the environment."""
        program, *arguments = command
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        own = {"SNAPKV_CACHE_DIR": str(self.folder / "cache"), "HF_HUB_OFFLINE": "1"}
        return run([str(self.folder / "bin" / program), *arguments], self.folder, kept | own)

    def versions(self) -> dict[str, Any]:
        """Of the software that a result depends on, as the package says it there."""
        code = (
            "import json; from snapkv_lab.measure.environment import versions; "
            "print(json.dumps(versions()))"
        )
        found: dict[str, Any] = json.loads(self.run("python", "-c", code))
        return found


def run(command: Sequence[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    """What a command prints.

    Raises:
        NotReleasableError: it fails; with the end of what it said.
    """
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise NotReleasableError(f"{' '.join(command)}: status {done.returncode}\n{said}")
    return done.stdout
