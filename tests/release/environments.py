"""Empty environments, and what is installed into them."""

import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("snapkv", "snapkv-app", "snapkv-lab", "snapkv-vllm")
MOST_WHEEL_BYTES = 2_500_000


def _extras(package: str) -> list[str]:
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text("utf-8"))
    return list(project["project"]["optional-dependencies"])


EXTRAS = {
    **{extra: [f"snapkv-lab[{extra}]"] for extra in _extras("snapkv-lab")},
    **{extra: [f"snapkv-app[{extra}]"] for extra in _extras("snapkv-app")},
    "dev": ["-r", str(ROOT / "requirements-dev.txt")],
}
"""What pip is asked for, by name; `dev` is what the tests, the pages and the browser's tests need.
vLLM has an environment of its own."""


class NotReleasableError(Exception):
    """What would be released does not do what it is to do."""


def build(package: str, folder: Path) -> tuple[Path, Path]:
    """Wheel and sdist of a package, built from its folder alone."""
    home, module = ROOT / "packages" / package, package.replace("-", "_")
    run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], home)
    (wheel,), (sdist,) = folder.glob(f"{module}-*.whl"), folder.glob(f"{module}-*.tar.gz")
    if (size := wheel.stat().st_size) > MOST_WHEEL_BYTES:
        raise NotReleasableError(
            f"{wheel.name}: expected at most {MOST_WHEEL_BYTES:,} bytes, got {size:,}"
        )
    names = zipfile.ZipFile(wheel).namelist()
    files = {
        path.relative_to(home / "src").as_posix()
        for path in (home / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    if other := files ^ {name for name in names if name.startswith(f"{module}/")}:
        raise NotReleasableError(
            f"{wheel.name}: expected the files of the source, differs in {sorted(other)}"
        )
    for wanted in ("py.typed", "licenses/LICENSE", "METADATA"):
        if not any(name.endswith(wanted) for name in names):
            raise NotReleasableError(f"{wheel.name}: expected a file {wanted}, got none")
    return wheel, sdist


def pins(transformers: str | None) -> list[str]:
    """Those of `constraints.txt`, with another release of transformers where one is asked for."""
    found = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    if transformers is None:
        return found
    return [pin for pin in found if not pin.startswith("transformers==")] + [
        f"transformers=={transformers}"
    ]


class Environment:
    """An empty environment of one Python, outside of the repository.

    Args:
        python: the Python that makes it.
        folder: where it will be.
        wheels: a folder that pip finds our packages in.
        pins: the releases to hold pip to, as `constraints.txt` has them.
    """

    def __init__(self, python: str, folder: Path, wheels: Path, pins: Sequence[str]) -> None:
        run([python, "-m", "venv", str(folder)], folder.parent)
        self.python, self.folder, self._wheels = folder / "bin" / "python", folder, wheels
        self._constraints = folder / "constraints.txt"
        self._constraints.write_text("\n".join(pins) + "\n", "utf-8")

    def install(self, *what: str) -> None:
        """Install by pip, with the releases that the tests know."""
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        ours = ["--find-links", str(self._wheels), "-c", str(self._constraints)]
        run([*pip, "--no-compile", *ours, *what], self.folder)

    def run(self, *command: str, status: int = 0, typed: str = "") -> str:
        """What a command of the environment prints; models are converted into the environment."""
        program, *arguments = command
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        own = {"SNAPKV_CACHE_DIR": str(self.folder / "cache"), "HF_HUB_OFFLINE": "1"}
        full = [str(self.folder / "bin" / program), *arguments]
        return run(full, self.folder, kept | own, status, typed)


def run(
    command: Sequence[str],
    folder: Path,
    environment: dict[str, str] | None = None,
    status: int = 0,
    typed: str = "",
) -> str:
    """What a command prints."""
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=environment, input=typed
    )
    if done.returncode != status:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise NotReleasableError(f"{' '.join(command)}: status {done.returncode}\n{said}")
    return done.stdout + (done.stderr if status else "")
