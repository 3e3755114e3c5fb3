"""A newcomer's first day: ten files and questions, asked with no flag at all.

Every pair is one run of `snapkv ask FILE... -q QUESTION --json`, so it follows whatever that
command does by default, in the dtype that models are served in; and one with `--policy full`.
"""

import contextlib
import importlib.metadata
import io
import itertools
import json
import random
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from snapkv.cli.app import run
from snapkv_lab.experiments.experiment import Experiment, Given, Sized
from snapkv_lab.experiments.pages import Table
from snapkv_lab.experiments.records import Row

_SERVICES = ("gateway", "billing", "search", "mailer", "indexer", "auth")
_EVENTS = (
    *("request served", "cache refreshed", "connection accepted", "job finished"),
    *("queue drained", "session renewed"),
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
    return _stamped(rng, lines, told)


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
    return _stamped(rng, lines, told)


def _stamped(rng: random.Random, lines: list[str], told: Mapping[int, str]) -> str:
    """The lines with others put in, and a time before each, which goes on by some seconds."""
    for place, line in told.items():
        lines.insert(place, line)
    second, stamped = 8 * 3600, []
    for line in lines:
        second += rng.randrange(3, 40)
        hour, minute = divmod(second // 60, 60)
        stamped.append(f"2026-03-14 {hour:02}:{minute:02}:{second % 60:02} {line}")
    return "\n".join(stamped)


def _of_package(package: str, *endings: str) -> list[Path]:
    """Files that pip installed with a package, by the ends of their names."""
    installed = importlib.metadata.files(package) or []
    found = [each for end in endings for each in installed if str(each).endswith(end)]
    return [Path(str(each.locate())) for each in found]


_DATASETS = ("descr/wine_data.rst", "descr/iris.rst", "descr/diabetes.rst")


def pairs(folder: Path) -> Iterator[tuple[str, list[Path], str, str]]:
    """What kind of text, files, a question, and what a right answer has in it."""
    for package, name, question, expected in (
        ("h11", "METADATA", "Who is the author of h11?", "Nathaniel J. Smith"),
        ("hypothesis", "LICENSE.txt", "Who is the license steward?", "Mozilla Foundation"),
        ("colorama", "METADATA", "Who is the author of colorama?", "Jonathan Hartley"),
    ):
        yield "prose", _of_package(package, name), question, expected
    cancer, asked = ("descr/breast_cancer.rst",), "What is the number of instances?"
    yield "numbers", _of_package("scikit-learn", *cancer), asked, "569"
    asked = "How many instances are in the diabetes dataset?"
    yield "numbers", _of_package("scikit-learn", *_DATASETS), asked, "442"
    for name, constant, expected in (
        ("poplib.py", "POP3_SSL_PORT", "995"),
        ("http/__init__.py", "INSUFFICIENT_STORAGE", "507"),
        ("stat.py", "FILE_ATTRIBUTE_VIRTUAL", "65536"),
    ):
        source = Path(sysconfig.get_path("stdlib")) / name
        yield "code", [source], f"What is the value of {constant}?", expected
    for name, text, question, expected in (
        ("server.log", server_log(), "How full is the disk?", "93"),
        ("build.log", build_log(), "What is the version of the compiler?", "17.0.6"),
    ):
        path = folder / name
        path.write_text(text, encoding="utf-8")
        yield "log", [path], question, expected


def _measure(given: Given) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        for kind, files, question, expected in itertools.islice(pairs(Path(folder)), given.pairs):
            text = "\n".join(path.read_text(encoding="utf-8") for path in files)
            if expected not in text:
                raise ValueError(f"expected {expected!r} in {[path.name for path in files]}")
            said = ("--question", question, "--model", given.model, "--dtype", given.dtype)
            ours, full = (
                _ask([*map(str, files), *said, *more]) for more in ((), ("--policy", "full"))
            )
            about = {"kind": kind, "files": [path.name for path in files], "question": question}
            yield about | {"expected": expected} | _judged(ours, full, expected)


def _judged(record: Row, compared: Row, expected: str) -> Row:
    (ours,), (full,) = record["runs"], compared["runs"]
    return {
        "prompt_tokens": ours["prompt_tokens"],
        "policy": ours["policy"],
        "answer": ours["text"],
        "full_answer": full["text"],
        "right": expected in ours["text"],
        "full_right": expected in full["text"],
        **{key: ours["cache"][key] for key in ("kept_tokens", "held_bytes", "full_bytes", "bits")},
        "lost_votes": record["lost_votes"],
        "model": record["model"],
    }


def _ask(arguments: list[str]) -> dict[str, Any]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = run(["ask", *arguments, "--json"])
    if status:
        raise RuntimeError(f"expected status 0 of {arguments}, got {status}")
    record: dict[str, Any] = json.loads(output.getvalue())
    return record


def _sums(rows: list[Row]) -> list[Row]:
    shares = [row["held_bytes"] / row["full_bytes"] for row in rows]
    return [
        {
            "questions": len(rows),
            "full": sum(row["full_right"] for row in rows),
            "both": sum(row["right"] and row["full_right"] for row in rows),
            "share": sum(r["held_bytes"] for r in rows) / sum(r["full_bytes"] for r in rows),
            "most": max(shares),
        }
    ]


def _lost(row: Row) -> str:
    lost = row["lost_votes"]
    share = "" if lost["share"] is None else f"{lost['share']:.0%}, "
    return f"{share}{lost['word'] or 'not known'}"


FIRST_DAY = Experiment(
    name="first_day",
    title="First day: ten files and questions, without any option",
    measure=_measure,
    options={"pairs": Sized(10, 1), "dtype": "bfloat16"},
    tables=[
        Table(
            {
                "questions": "{questions}",
                "full cache right": "{full}",
                "`ask` right too": "{both}",
                "bytes": "{share:.0%}",
                "at most": "{most:.0%}",
            },
            made=_sums,
        ),
        Table(
            {
                "question": lambda row: f"{row['question']} ({', '.join(row['files'])})",
                "kind": "{kind}",
                "tokens": "{prompt_tokens:,}",
                "expected": "{expected}",
                "full": lambda row: "right" if row["full_right"] else "wrong",
                "`ask`": lambda row: "right" if row["right"] else "wrong",
                "bytes": lambda row: f"{row['held_bytes'] / row['full_bytes']:.0%}",
                "lost votes": _lost,
            }
        ),
    ],
)
