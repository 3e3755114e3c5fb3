"""Files of earlier releases load, and their caches continue with the recorded tokens."""

import pytest

from tests.golden import golden, record, saved

RECORDED = record.read(saved.EXPECTED)


@pytest.fixture(scope="module")
def compare():
    alike = record.arithmetic() == RECORDED["arithmetic"]
    return record.differences if alike else golden.beyond_rounding


@pytest.mark.parametrize("kind", saved.KINDS)
def test_saved_file_loads_and_continues_as_recorded(kind, compare):
    found = record.noted(saved.loaded(kind))
    assert "error" not in found
    assert not compare(found, RECORDED["cases"][kind])
