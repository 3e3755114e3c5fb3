"""A newcomer's first day: ten files and questions, asked with no flag at all.

    python -m snapkv_lab.experiments first_day            measure, write the rows, render the page
    python -m snapkv_lab.experiments first_day --render
        render the page from the rows that are there

Every pair is one run of `snapkv ask FILE... -q QUESTION --compare --json`, so it follows whatever
that command does by default. Rows: `docs/results/first_day.jsonl`. Page:
`docs/results/tables/first_day.md`.
"""

import contextlib
import importlib.metadata
import io
import json
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapkv.cli.app import run
from snapkv_lab.experiments.environment import describe_environment
from snapkv_lab.experiments.first_day_logs import build_log, server_log
from snapkv_lab.experiments.records import (
    RESULTS,
    TABLES,
    Row,
    environment_line,
    markdown_table,
    measure_or_render,
    tables_page,
)

ROWS = RESULTS / "first_day.jsonl"
PAGE = TABLES / "first_day.md"


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


def measure() -> Iterator[Row]:
    """Ask every question of its files."""
    environment = describe_environment()
    with tempfile.TemporaryDirectory() as folder:
        for pair in PAIRS:
            print(pair.question, file=sys.stderr)
            yield {**_asked(pair, pair.files(Path(folder))), "environment": environment}


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


def render(rows: list[Row]) -> str:
    """The tables of these rows."""
    title = "First day: ten files and questions, without any option"
    return tables_page("first_day", title, environment_line(rows), _sums(rows), _table(rows))


def _sums(rows: list[Row]) -> str:
    both = sum(row["right"] and row["full_right"] for row in rows)
    share = sum(row["held_bytes"] for row in rows) / sum(row["full_bytes"] for row in rows)
    most = max(row["held_bytes"] / row["full_bytes"] for row in rows)
    full = sum(row["full_right"] for row in rows)
    header = ["questions", "full cache right", "`ask` right too", "bytes", "at most"]
    cells = [str(len(rows)), str(full), str(both), f"{share:.0%}", f"{most:.0%}"]
    return markdown_table(header, [cells])


def _table(rows: list[Row]) -> str:
    header = ["question", "kind", "tokens", "expected", "full", "`ask`", "bytes", "lost votes"]
    return markdown_table(header, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    lost = row["lost_votes"]
    share = "" if lost["share"] is None else f"{lost['share']:.0%}, "
    return [
        f"{row['question']} ({', '.join(row['files'])})",
        row["kind"],
        f"{row['prompt_tokens']:,}",
        row["expected"],
        "right" if row["full_right"] else "wrong",
        "right" if row["right"] else "wrong",
        f"{row['held_bytes'] / row['full_bytes']:.0%}",
        f"{share}{lost['word'] or 'not known'}",
    ]


if __name__ == "__main__":
    measure_or_render(__doc__, measure, render, rows=ROWS, page=PAGE)
