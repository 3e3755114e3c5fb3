"""Seeds one fault after the other into a copy of the source: do the tests notice?

Run from the root of the repository; exit status 1 where one is not noticed:

    python -m tests.faults                   each by the tests that are named beside it
    python -m tests.faults --suite           each by the whole default suite (hours)
    python -m tests.faults --only NAME ...   those whose names contain one of these words
    python -m tests.faults --vllm            those of vLLM's plugin, in its environment
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults.faults import FAULTS, Fault

MOST_SECONDS = 900


def seed(fault: Fault, folder: Path) -> None:
    """Write the fault into the copy of its package in a folder."""
    path = folder / fault.file
    text = path.read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, (
        f"{fault.file}: {fault.old!r} stands {text.count(fault.old)}x"
    )
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def is_noticed(fault: Fault, *, suite: bool) -> bool:
    """Whether a test fails with the fault in the source."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(fault.file).parts[0]
        (source,) = Path("packages").glob(f"*/src/{package}")
        shutil.copytree(source, Path(folder) / package)
        seed(fault, Path(folder))
        path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        marked = ("-m", "vllm and not slow") if fault.vllm else ()
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-xq", *marked, *(() if suite else fault.tests)],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=None if suite else MOST_SECONDS,
            check=False,
        )
    assert ran.returncode in (0, 1, 2), f"pytest ended with {ran.returncode}: no test was judged"
    return ran.returncode != 0


def main(arguments: Sequence[str]) -> int:
    """Seed the chosen faults and say which were noticed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", action="store_true")
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--only", nargs="+", default=[""])
    options = parser.parse_args(arguments)
    missed = 0
    for fault in FAULTS:
        if fault.vllm != options.vllm or not any(word in fault.name for word in options.only):
            continue
        begun = time.monotonic()
        noticed = is_noticed(fault, suite=options.suite)
        missed += not noticed
        verdict = "noticed" if noticed else "NOT NOTICED"
        print(f"{verdict:<12} {time.monotonic() - begun:5.0f} s  {fault.name}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
