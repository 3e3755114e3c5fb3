"""Play many random sequences, and say what became of them."""

import argparse
import collections
import itertools
import multiprocessing
import sys

from tests.sequences.drawing import drawn
from tests.sequences.playing import EQUAL, ERROR, REFUSED, WRONG
from tests.sequences.shrinking import cause, played, shrunk


def main() -> int:
    """Do what the options say; 1 where something was wrong or had no name."""
    parser = argparse.ArgumentParser(prog="python -m tests.sequences", description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="how many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--shrink", type=int, default=2, help="failures of each cause to make short"
    )
    given = parser.parse_args()
    numbers = range(given.first, given.first + given.count)
    found: dict[str, list[int]] = collections.defaultdict(list)
    kinds: collections.Counter[str] = collections.Counter()
    refusals: collections.Counter[str] = collections.Counter()
    seconds = 0.0
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        jobs = zip(itertools.repeat(given.seed), numbers)
        for number, verdict, took in pool.imap_unordered(played, jobs, chunksize=8):
            kinds[verdict.kind] += 1
            if kinds.total() % 500 == 0:
                told = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
                sys.stdout.write(f"{given.first + kinds.total()} played: {told}\n")
                sys.stdout.flush()
            seconds += took
            if verdict.kind == REFUSED:
                refusals.update(set(verdict.said))
            elif verdict.kind != EQUAL:
                found[cause(verdict)].append(number)
                sys.stdout.write(f"{number}: {verdict.kind}: {verdict.said[0]}\n")
                sys.stdout.flush()
    sys.stdout.write("\nrefused by name:\n")
    for said, count in refusals.most_common():
        sys.stdout.write(f"{count:6} {said}\n")
    for what, failed in sorted(found.items()):
        sys.stdout.write(f"\n{len(failed)} x {what}\n  numbers {sorted(failed)[:12]}\n")
        for number in sorted(failed)[: given.shrink]:
            sequence, verdict = shrunk(drawn(given.seed, number))
            sys.stdout.write(f"  {number}: {sequence}\n      {verdict.said[0]}\n")
            sys.stdout.flush()
    told = ", ".join(f"{kinds[kind]} {kind}" for kind in (EQUAL, REFUSED, WRONG, ERROR))
    speed = given.count / seconds
    sys.stdout.write(f"\n{told}; {speed:.1f} sequences a second of one core\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
