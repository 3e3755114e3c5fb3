"""Every case matches the golden record, and the comparison detects every difference."""

import copy

import pytest

from tests.golden import golden, record
from tests.golden.cases import Case, parse

RECORDED = record.read(golden.FILE)["cases"]
BY_ROUNDING_ONLY = tuple(RECORDED)[::12]


@pytest.fixture(scope="module")
def arithmetic():
    """Return the digest of how this machine rounds numbers."""
    return record.arithmetic()


@pytest.mark.parametrize("name", RECORDED)
def test_case_matches_its_golden_record(name, arithmetic):
    """On a machine that rounds differently, only what rounding cannot change is compared."""
    is_exact = RECORDED[name]["arithmetic"] == arithmetic
    compare = record.differences if is_exact else golden.beyond_rounding
    assert not compare(record.seen_in(parse(name)), RECORDED[name])


@pytest.mark.parametrize("name", BY_ROUNDING_ONLY)
def test_perturbed_weights_match_golden_record_within_rounding(name):
    """Weights that are changed by one part in a million simulate another machine."""
    assert not golden.beyond_rounding(record.seen_in(parse(name), nudged=True), RECORDED[name])


def test_nearly_all_recorded_stages_are_independent_of_rounding():
    stages = sum(len(case["stages"]) for case in RECORDED.values())
    assert sum(case["hold"] for case in RECORDED.values()) >= 0.98 * stages


@pytest.fixture(scope="module")
def seen():
    return record.seen_in(Case())


def changed(seen, change):
    """Return a copy of a record in which `change` was applied to the last stage."""
    other = copy.deepcopy(seen)
    change(other["stages"][-1])
    return other


CHANGES = {
    "stage": lambda stage: stage.update(name="another"),
    "tokens": lambda stage: stage["tokens"][0].append(1),
    "positions": lambda stage: stage["positions"]["1"][0].append("0-3"),
    "layer": lambda stage: stage["positions"].pop("2"),
    "report": lambda stage: stage["report"].update(held_bytes=1),
    "layers": lambda stage: stage["layers"].pop(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_record_is_detected_bit_for_bit_and_within_rounding(seen, change):
    other = {**changed(seen, change), "hold": len(seen["stages"]), "close": 1e-3}
    assert record.differences(seen, other)
    assert golden.beyond_rounding(seen, other)


def test_logits_are_compared_bit_for_bit_or_within_rounding(seen):
    nudged = {**record.seen_in(Case(), nudged=True), "hold": len(seen["stages"]), "close": 1e-3}
    assert any("logits" in line for line in record.differences(seen, nudged))
    assert not golden.beyond_rounding(seen, nudged)
    further = copy.deepcopy(nudged)
    bits = further["stages"][0]["logits"][0]
    further["stages"][0]["logits"][0] = bits[8:16] + bits[8:]
    assert golden.beyond_rounding(seen, further)
