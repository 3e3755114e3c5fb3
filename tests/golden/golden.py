"""The committed record: which cases are in it, and what holds on a machine that rounds otherwise."""

from pathlib import Path

from tests.golden import record
from tests.golden.cases import AXES, Case, covering, parse, two_choices
from tests.golden.record import Record

FILE = Path(__file__).parent / "golden.json.xz"
LOGITS = 4
"""How many logits of each row are written down; the digest is of all of them."""


def renew() -> Record:
    """Choose the cases of the committed file and record them.

    They are all pairs of choices that are refused, and few cases in which any two others meet. Of
    each case it is written down how many stages `hold`: they have the same tokens and positions if
    the weights are off by one part in a million, so no other way of rounding will change them.
    """
    alone = record.made(two_choices())["cases"]
    refusing = [parse(name) for name, found in alone.items() if "error" in found]
    refused = frozenset(pair for case in refusing for pair in [_what_is_special(case)] if pair)
    made = record.made([*refusing, *covering(refused)])
    for name, found in made["cases"].items():
        found["hold"] = _alike(found, record.seen_in(parse(name), nudged=True))
        for stage in found["stages"]:
            stage["logits"] = [bits[: 8 * LOGITS] for bits in stage["logits"]]
    return made


def _what_is_special(case: Case) -> tuple[str, str, str, str] | None:
    """The two choices that are not the default; None where there are not two."""
    own = [(axis, getattr(case, axis)) for axis in AXES if getattr(case, axis) != AXES[axis][0]]
    return (*own[0], *own[1]) if len(own) == 2 else None


def _alike(found: Record, other: Record) -> int:
    """How many stages from the first on have the same tokens and positions in both."""
    for count, (one, two) in enumerate(zip(found["stages"], other["stages"], strict=False)):
        if (one["tokens"], one["positions"]) != (two["tokens"], two["positions"]):
            return count
    return min(len(found["stages"]), len(other["stages"]))
