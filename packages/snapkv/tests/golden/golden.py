"""The committed record, and the comparison with it on machines that round differently."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.golden import record
from tests.golden.cases import STORAGES, Case, parse
from tests.golden.record import Record

FILE = Path(__file__).parent / "golden.json.xz"
LOGITS = 4
"""Number of logits of each row that are recorded; the digest covers all of them."""


def recorded(names: Iterable[str]) -> Record:
    """Run these cases and return their record in the form of the committed file.

    The record says how many stages of each case `hold`: their tokens and positions stay equal if
    the weights change by one part in a million, so rounding will not change them either.
    """
    made = record.made(map(parse, names))
    for name, found in made["cases"].items():
        found["close"] = closeness(parse(name))
        found["hold"] = _alike(found, record.seen_in(parse(name), nudged=True))
        for stage in found["stages"]:
            stage["logits"] = [bits[: 8 * LOGITS] for bits in stage["logits"]]
    return made


def renewed(names: Sequence[str]) -> Record:
    """Return the committed record with these cases recorded again, or all if none is named."""
    before = record.read(FILE)
    found = recorded(names or before["cases"])
    return {**found, "cases": before["cases"] | found["cases"]}


def closeness(case: Case) -> float:
    """Return the allowed difference of logits; rounding may change a quantized code."""
    return 0.25 if "quantize" in STORAGES[case.storage] else 1e-3


def _alike(found: Record, other: Record) -> int:
    """Count the leading stages with equal tokens and positions in both records."""
    for count, (one, two) in enumerate(zip(found["stages"], other["stages"], strict=False)):
        if (one["tokens"], one["positions"]) != (two["tokens"], two["positions"]):
            return count
    return min(len(found["stages"]), len(other["stages"]))


def beyond_rounding(found: Record, recorded: Record) -> list[str]:
    """Return the differences between a case and its record that rounding cannot explain.

    Rounding does not change the error or the names of the stages. In the stages that `hold`, it
    does not change tokens, positions and reports either, and the logits are `close`.
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
