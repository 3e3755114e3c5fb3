"""A newcomer's first day: ten files and questions, asked with no flag at all.

Every pair is one run of `snapkv ask FILE... -q QUESTION --compare --json`, so it follows whatever
that command does by default.
"""

import contextlib
import importlib.metadata
import io
import json
import random
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapkv.cli.app import run
from snapkv_lab.experiments.experiment import Experiment, Given, Shown, table
from snapkv_lab.experiments.records import (
    Row,
)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A file, or some, and a question.

    Attributes:
        kind: "prose", "numbers", "code" or "log".
        files: where they are, given a folder in which logs can be written.
        question: what is asked.
        expected: what a right answer has in it.
    """

    kind: str
    files: Callable[[Path], list[Path]]
    question: str
    expected: str


def _of_package(package: str, *endings: str) -> Callable[[Path], list[Path]]:
    """Files that pip installed with a package, by the ends of their names."""

    def files(folder: Path) -> list[Path]:
        del folder
        installed = importlib.metadata.files(package) or []
        found = [each for end in endings for each in installed if str(each).endswith(end)]
        return [Path(str(each.locate())) for each in found]

    return files


def _of_python(name: str) -> Callable[[Path], list[Path]]:
    """A source file of the standard library."""

    def files(folder: Path) -> list[Path]:
        del folder
        return [Path(sysconfig.get_path("stdlib")) / name]

    return files


def _written(name: str, text: Callable[[], str]) -> Callable[[Path], list[Path]]:
    """A file that is written for the occasion."""

    def files(folder: Path) -> list[Path]:
        path = folder / name
        path.write_text(text(), encoding="utf-8")
        return [path]

    return files


_SERVICES = ("gateway", "billing", "search", "mailer", "indexer", "auth")
_EVENTS = (
    "request served",
    "cache refreshed",
    "connection accepted",
    "job finished",
    "queue drained",
    "session renewed",
)
_STEPS = ("fetching", "compiling", "linking", "testing", "packing")
_PARTS = ("core", "parser", "renderer", "network", "storage", "console", "codec", "scheduler")


def server_log() -> str:
    """An hour of a server: what was served, a disk that fills up and a payment that fails."""
    rng = random.Random(7)
    lines = [
        f"INFO {rng.choice(_SERVICES)} {rng.choice(_EVENTS)} in {rng.randrange(2, 900)} ms"
        for _ in range(60)
    ]
    told = {
        22: "ERROR billing payment 48213 failed: card declined by bank Nordholm",
        45: "WARNING search disk /dev/sdb1 is 93 percent full",
    }
    return "\n".join(_stamped(rng, _with(lines, told)))


def build_log() -> str:
    """A build: what was compiled and tested, a test that failed and where the result was put."""
    rng = random.Random(11)
    lines = [
        f"{rng.choice(_STEPS)} {rng.choice(_PARTS)} module {number} done in "
        f"{rng.randrange(10, 99)}.{rng.randrange(10)} s"
        for number in range(1, 56)
    ]
    told = {
        19: "the compiler is clang version 17.0.6",
        38: "FAILED test_reconnect: timeout after 30 seconds",
        50: "the release was uploaded to the server falcon",
    }
    return "\n".join(_stamped(rng, _with(lines, told)))


def _with(lines: Sequence[str], told: Mapping[int, str]) -> list[str]:
    """The lines with others put in where they happened."""
    both = list(lines)
    for place, line in told.items():
        both.insert(place, line)
    return both


def _stamped(rng: random.Random, lines: Sequence[str]) -> list[str]:
    """The lines with a time before each, which goes on by some seconds."""
    second, stamped = 8 * 3600, []
    for line in lines:
        second += rng.randrange(3, 40)
        hour, minute = divmod(second // 60, 60)
        stamped.append(f"2026-03-14 {hour:02}:{minute:02}:{second % 60:02} {line}")
    return stamped


_DATASETS = ("descr/wine_data.rst", "descr/iris.rst", "descr/diabetes.rst")

PAIRS = (
    Pair(
        kind="prose",
        files=_of_package("h11", "METADATA"),
        question="Who is the author of h11?",
        expected="Nathaniel J. Smith",
    ),
    Pair(
        kind="prose",
        files=_of_package("hypothesis", "LICENSE.txt"),
        question="Who is the license steward?",
        expected="Mozilla Foundation",
    ),
    Pair(
        kind="prose",
        files=_of_package("colorama", "METADATA"),
        question="Who is the author of colorama?",
        expected="Jonathan Hartley",
    ),
    Pair(
        kind="numbers",
        files=_of_package("scikit-learn", "descr/breast_cancer.rst"),
        question="What is the number of instances?",
        expected="569",
    ),
    Pair(
        kind="numbers",
        files=_of_package("scikit-learn", *_DATASETS),
        question="How many instances are in the diabetes dataset?",
        expected="442",
    ),
    Pair(
        kind="code",
        files=_of_python("poplib.py"),
        question="What is the value of POP3_SSL_PORT?",
        expected="995",
    ),
    Pair(
        kind="code",
        files=_of_python("http/__init__.py"),
        question="What is the value of INSUFFICIENT_STORAGE?",
        expected="507",
    ),
    Pair(
        kind="code",
        files=_of_python("stat.py"),
        question="What is the value of FILE_ATTRIBUTE_VIRTUAL?",
        expected="65536",
    ),
    Pair(
        kind="log",
        files=_written("server.log", server_log),
        question="How full is the disk?",
        expected="93",
    ),
    Pair(
        kind="log",
        files=_written("build.log", build_log),
        question="What is the version of the compiler?",
        expected="17.0.6",
    ),
)


def measure(given: Given) -> Iterator[Row]:
    """Ask every question of its files."""
    with tempfile.TemporaryDirectory() as folder:
        for pair in PAIRS:
            print(pair.question, file=sys.stderr)
            yield _asked(pair, pair.files(Path(folder)))


def _asked(pair: Pair, files: list[Path]) -> Row:
    """What the command says about one pair, both answers judged."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    if pair.expected not in text:
        raise ValueError(f"expected {pair.expected!r} in {[path.name for path in files]}")
    record = _ask([*map(str, files), "--question", pair.question])
    ours, full = record["runs"]
    return {
        "kind": pair.kind,
        "files": [path.name for path in files],
        "question": pair.question,
        "expected": pair.expected,
        "prompt_tokens": ours["prompt_tokens"],
        "policy": ours["policy"],
        "answer": ours["text"],
        "full_answer": full["text"],
        "right": pair.expected in ours["text"],
        "full_right": pair.expected in full["text"],
        "kept_tokens": ours["cache"]["kept_tokens"],
        "held_bytes": ours["cache"]["held_bytes"],
        "full_bytes": ours["cache"]["full_bytes"],
        "lost_votes": record["lost_votes"],
        "comparison": record["comparison"],
        "model": record["model"],
    }


def _ask(arguments: list[str]) -> dict[str, Any]:
    """The JSON object of one run of the command."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = run(["ask", *arguments, "--compare", "--json"])
    if status:
        raise RuntimeError(f"expected status 0 of {arguments}, got {status}")
    record: dict[str, Any] = json.loads(output.getvalue())
    return record


def _tables(rows: list[Row]) -> list[str]:
    shares = [row["held_bytes"] / row["full_bytes"] for row in rows]
    sums = {
        "questions": len(rows),
        "full": sum(row["full_right"] for row in rows),
        "both": sum(row["right"] and row["full_right"] for row in rows),
        "share": sum(row["held_bytes"] for row in rows) / sum(row["full_bytes"] for row in rows),
        "most": max(shares),
    }
    return [
        table(
            [sums],
            {
                "questions": "{questions}",
                "full cache right": "{full}",
                "`ask` right too": "{both}",
                "bytes": "{share:.0%}",
                "at most": "{most:.0%}",
            },
        ),
        table(
            rows,
            {
                "question": lambda row: f"{row['question']} ({', '.join(row['files'])})",
                "kind": "{kind}",
                "tokens": "{prompt_tokens:,}",
                "expected": "{expected}",
                "full": lambda row: "right" if row["full_right"] else "wrong",
                "`ask`": lambda row: "right" if row["right"] else "wrong",
                "bytes": lambda row: f"{row['held_bytes'] / row['full_bytes']:.0%}",
                "lost votes": _lost,
            },
        ),
    ]


def _lost(row: Row) -> str:
    lost = row["lost_votes"]
    share = "" if lost["share"] is None else f"{lost['share']:.0%}, "
    return f"{share}{lost['word'] or 'not known'}"


EXPERIMENT = Experiment(
    name="first_day",
    title="First day: ten files and questions, without any option",
    measure=measure,
    tables=_tables,
    shown={
        "first-day": Shown(
            "First day: ten files and questions, without any option",
            ("questions", "full cache right", "`ask` right too", "bytes", "at most"),
        )
    },
)


if __name__ == "__main__":
    EXPERIMENT.main()
