"""Which rows in `docs/results` are older than the code they judge.

Rows name the commit they were measured on. Where a file's rows do not, those of `snapkv eval`, it
is the commit that stored them.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from snapkv_lab.experiments.experiment import Experiment
from snapkv_lab.experiments.records import RESULTS, git, grouped

_CORE = Path("packages/snapkv/src/snapkv")
JUDGED = [
    _CORE / name
    for name in (
        *("app", "cache", "decoding", "document.py", "hf", "kvzip.py", "library", "ops", "plan"),
        *("policies", "prefill", "storage"),
    )
]
"""Answers, memory and times come of these; commands and pages do not change them."""
SERVED = {"scale", "serving", "serving_caps", "sessions", "shared_documents"}
_COMMIT = re.compile(r'"commit": ?"([0-9a-f]{7,40})"')


class Age(NamedTuple):
    """Of the oldest rows of one kind.

    Attributes:
        name: of the file or folder, below `docs/results`.
        commit: that they were measured on; empty where the checkout does not know it.
        day: of the commit.
        since: how many commits changed the judged code since.
    """

    name: str
    commit: str
    day: str
    since: int

    def __str__(self) -> str:
        if not self.commit:
            return f"{self.name:<34}of a commit that this checkout does not have"
        return f"{self.name:<34}{self.commit}  {self.day}  {self.since:>4} commits since"


def ages(results: Path) -> Iterator[Age]:
    """Of every file of rows, and of every folder of them, in the order of their names."""
    for place, files in grouped(sorted(results.rglob("*.jsonl")), partial(_place, results)).items():
        judged = [*JUDGED, *[Path("packages/snapkv-vllm/src")] * (place in SERVED)]
        commits = {each for file in files for each in _commits(file)}
        found = [_age(place, each, judged) for each in commits]
        yield max(found, key=lambda each: (not each.commit, each.since))


def _place(results: Path, file: Path) -> str:
    name = file.relative_to(results).with_suffix("")
    return str(name.parent if name.parent.name else name)


def _commits(file: Path) -> set[str]:
    told = set(_COMMIT.findall(file.read_text("utf-8")))
    return told or {git("log", "-1", "--format=%h", "--abbrev=10", "--", str(file))}


def _age(name: str, commit: str, judged: list[Path]) -> Age:
    since = git("rev-list", "--count", f"{commit}..HEAD", "--", *map(str, judged))
    if not commit or not since:
        return Age(name, "", "", 0)
    return Age(name, commit, git("log", "-1", "--format=%cs", commit), int(since))


def _say(_: object) -> None:
    """What there is to measure again, the oldest first."""
    old = [each for each in ages(RESULTS) if each.since or not each.commit]
    print(f"{len(old)} kinds of rows are older than the code they judge:")
    print(*sorted(old, key=lambda each: -each.since), sep="\n")
    print("`python -m snapkv_lab.experiments NAME` measures again, `make results` all.")
    print("What is measured case by case only adds what is missing: remove its rows before.")


AGES = Experiment(name="ages", title="Rows that are older than the code they judge", drawn=_say)
