"""The command line: record, and compare with a record."""

import argparse
import sys
from pathlib import Path

import transformers

from tests.golden import record, saved
from tests.golden.cases import parse
from tests.golden.golden import FILE, added, recorded


def compare(path: Path) -> int:
    """Say which cases of a record differ today, and in what; 1 if one does."""
    expected = record.read(path)
    found, count = record.made(parse(name) for name in expected["cases"]), 0
    for name, other in expected["cases"].items():
        told = record.differences(found["cases"][name], other)
        if told:
            count += 1
            sys.stdout.write(f"{name}\n" + "".join(f"    {line[:400]}\n" for line in told))
    both = (*found["cases"].values(), *expected["cases"].values())
    if len({case["arithmetic"] for case in both}) > 1:
        sys.stdout.write("some cases were made where numbers are rounded in another way\n")
    sys.stdout.write(f"{count} of {len(expected['cases'])} cases differ\n")
    return min(1, count)


def main() -> int:
    """Do what the options say; 1 where something differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--write", type=Path, metavar="FILE", help="record the cases into a file")
    way.add_argument("--against", type=Path, metavar="FILE", help="compare with a record")
    way.add_argument("--renew", action="store_true", help="record the committed file anew")
    way.add_argument("--add", nargs="+", metavar="CASE", help="record cases that it lacks")
    way.add_argument("--renew-saved", action="store_true", help="write the saved caches anew")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if given.against:
        return compare(given.against)
    if given.renew_saved:
        saved.write()
    elif given.write:
        record.write(record.made(map(parse, record.read(FILE)["cases"])), given.write)
    else:
        names = record.read(FILE)["cases"]
        record.write(recorded(names) if given.renew else added(given.add), FILE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
