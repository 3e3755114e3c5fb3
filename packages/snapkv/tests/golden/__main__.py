"""The command line: record, compare with a file, compare with another checkout."""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import transformers

from tests.golden import record, saved
from tests.golden.cases import Case, drawn, parse, two_choices
from tests.golden.golden import FILE, added, renew

ROOT = Path(__file__).parents[4]


def cases_of(name: str) -> list[Case]:
    """The cases of a set by its name."""
    if name == "default":
        return [parse(text) for text in record.read(FILE)["cases"]]
    if name == "pairs":
        return two_choices()
    return list(dict.fromkeys([*two_choices(), *itertools.islice(drawn(1), 1500)]))


def of_checkout(checkout: Path, which: str) -> record.Record:
    """The record that the source of another checkout gives, made in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "record")
        paths = [str(checkout / "src"), str(ROOT)]
        subprocess.run(
            [sys.executable, "-m", "tests.golden", "--write", str(path), "--set", which],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            check=True,
        )
        found = record.read(path)
    if not Path(found["source"]).is_relative_to(checkout):
        raise SystemExit(f"--checkout: expected to run {checkout}/src, got {found['source']}")
    return found


def compare(found: record.Record, expected: record.Record) -> int:
    """Say which cases differ, and in what; 1 if one does."""
    count = 0
    for name, other in expected["cases"].items():
        told = record.differences(found["cases"][name], other)
        if told:
            count += 1
            sys.stdout.write(f"{name}\n" + "".join(f"    {line[:400]}\n" for line in told))
    if found["arithmetic"] != expected["arithmetic"]:
        sys.stdout.write("the two were made where numbers are rounded in another way\n")
    sys.stdout.write(f"{count} of {len(expected['cases'])} cases differ\n")
    return min(1, count)


def main() -> int:
    """Do what the options say; 1 where something differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="record into a file")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with a record")
    parser.add_argument("--checkout", type=Path, metavar="FOLDER", help="compare with its source")
    parser.add_argument("--renew", action="store_true", help="choose and record the committed file")
    parser.add_argument("--add", action="store_true", help="record what the committed file lacks")
    parser.add_argument("--renew-saved", action="store_true", help="write the saved caches anew")
    parser.add_argument("--set", default="default", choices=["default", "pairs", "all"])
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if given.renew:
        record.write(renew(), FILE)
    elif given.add:
        record.write(added(), FILE)
    elif given.renew_saved:
        saved.write()
    elif given.write:
        record.write(record.made(cases_of(given.set)), given.write)
    elif given.against:
        expected = record.read(given.against)
        return compare(record.made(parse(name) for name in expected["cases"]), expected)
    elif given.checkout:
        other = of_checkout(given.checkout.resolve(), given.set)
        return compare(record.made(cases_of(given.set)), other)
    else:
        parser.error("expected --write, --against, --checkout or --renew")
    return 0


if __name__ == "__main__":
    sys.exit(main())
