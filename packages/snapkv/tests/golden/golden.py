"""The committed record, and the comparison with it on machines that round differently."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.golden import record
from tests.golden.cases import STORAGES, Case, parse
from tests.golden.record import Record

FILE = Path(__file__).parent / "golden.json.xz"
LOGITS = 4
"""How many logits of each row are written down; the digest is of all of them."""


def recorded(names: Iterable[str]) -> Record:
    """The record of these cases, as the committed file has it.

    Of each case it is written down how many stages `hold`: they have the same tokens and positions
    if the weights are off by one part in a million, so no other way of rounding will change them.
    """
    made = record.made(map(parse, names))
    for name, found in made["cases"].items():
        found["close"] = closeness(parse(name))
        found["hold"] = _alike(found, record.seen_in(parse(name), nudged=True))
        for stage in found["stages"]:
            stage["logits"] = [bits[: 8 * LOGITS] for bits in stage["logits"]]
    return made


def renewed(names: Sequence[str]) -> Record:
    """Return the committed record with these cases recorded anew; with all, if none is named."""
    before = record.read(FILE)
    found = recorded(names or before["cases"])
    return {**found, "cases": before["cases"] | found["cases"]}


def closeness(case: Case) -> float:
    """How far logits may be apart: where rounding flips a code of few bits, by some hundredths."""
    return 0.25 if "quantize" in STORAGES[case.storage] else 1e-3


def _alike(found: Record, other: Record) -> int:
    """How many stages from the first on have the same tokens and positions in both."""
    for count, (one, two) in enumerate(zip(found["stages"], other["stages"], strict=False)):
        if (one["tokens"], one["positions"]) != (two["tokens"], two["positions"]):
            return count
    return min(len(found["stages"]), len(other["stages"]))


def beyond_rounding(found: Record, recorded: Record) -> list[str]:
    """In what a case differs from its record by more than another way of rounding could explain.

    The error, the stages, and the reports of what was seen are the same whatever the rounding; so
    are tokens and positions in the stages that `hold`, and their logits are `close`.
    """
    told = [
        f"{part}: {found.get(part)}, recorded {recorded.get(part)}"
        for part in ("error",)
        if found.get(part) != recorded.get(part)
    ]
    names = [[stage["name"] for stage in case["stages"]] for case in (found, recorded)]
    if names[0] != names[1]:
        return [*told, f"stages: {names[0]}, recorded {names[1]}"]
    held = recorded["hold"]
    for own, other in zip(found["stages"][:held], recorded["stages"][:held], strict=True):
        told += [
            f"{other['name']}: {part} {own[part]}, recorded {other[part]}"
            for part in ("tokens", "positions", "report", "layers")
            if own[part] != other[part]
        ]
        apart = record.distance(own, other)
        if not apart <= recorded["close"]:
            told.append(f"{other['name']}: logits, by up to {apart:.2g}")
    return told
