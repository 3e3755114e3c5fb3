"""Empty environments, and the packages that are installed into them."""

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
    """The error that is raised if a check of a release fails."""


def build(package: str, folder: Path) -> tuple[Path, Path]:
    """Build the wheel and the sdist of a package from its folder alone, and check what the wheel
    contains.

    Args:
        package: the name of the package.
        folder: where both files are written.

    Returns:
        The path of the wheel and that of the sdist.

    Raises:
        NotReleasableError: the build fails, the wheel is too large, or its files are not those of
            the source.
    """
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
    """Return the lines of `constraints.txt`, in which the release of transformers is replaced
    unless `transformers` is None.
    """
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
        wheels: a folder in which pip finds our packages.
        pins: the releases that pip must install, as the lines of `constraints.txt`.

    Raises:
        NotReleasableError: the environment cannot be made.
    """

    def __init__(self, python: str, folder: Path, wheels: Path, pins: Sequence[str]) -> None:
        run([python, "-m", "venv", str(folder)], folder.parent)
        self.python, self.folder, self._wheels = folder / "bin" / "python", folder, wheels
        self._constraints = folder / "constraints.txt"
        self._constraints.write_text("\n".join(pins) + "\n", "utf-8")

    def install(self, *what: str) -> None:
        """Install packages with pip, in the releases that the tests know.

        Args:
            what: the arguments of ``pip install``.

        Raises:
            NotReleasableError: pip fails.
        """
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        ours = ["--find-links", str(self._wheels), "-c", str(self._constraints)]
        run([*pip, "--no-compile", *ours, *what], self.folder)

    def run(self, *command: str, status: int = 0, typed: str = "") -> str:
        """Run a command of the environment in its folder, and return its output; see the function
        `run`. Models are converted into that folder.

        Args:
            command: the program and its arguments.
            status: the exit status that is expected.
            typed: the text of standard input.

        Raises:
            NotReleasableError: the command ends with another status.
        """
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
    """Run a command, and return its standard output. If `status` is not 0, its standard error is
    appended.

    Args:
        command: the program and its arguments.
        folder: the working directory.
        environment: the environment variables; by default those of this process.
        status: the exit status that is expected.
        typed: the text of standard input.

    Raises:
        NotReleasableError: the command ends with another status; the message has the last lines of
            its output.
    """
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=environment, input=typed
    )
    if done.returncode != status:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise NotReleasableError(f"{' '.join(command)}: status {done.returncode}\n{said}")
    return done.stdout + (done.stderr if status else "")
