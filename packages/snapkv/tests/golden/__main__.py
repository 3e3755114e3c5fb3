"""The command line that records cases."""

import argparse

import transformers

from tests.golden import record, saved
from tests.golden.golden import FILE, renewed


def main() -> None:
    """Record the cases that the options name."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--renew", nargs="*", metavar="CASE", help="record these cases, or all, anew")
    way.add_argument("--renew-saved", action="store_true", help="write the saved caches anew")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if given.renew_saved:
        saved.write()
    else:
        record.write(renewed(given.renew), FILE)


if __name__ == "__main__":
    main()
