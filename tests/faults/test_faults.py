"""Every seeded fault still has a place in the source, and tests that are there."""

from pathlib import Path

import pytest

from tests.faults.faults import FAULTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_seeded(fault):
    (path,) = ROOT.glob(f"packages/*/src/{fault.file}")
    assert path.read_text(encoding="utf-8").count(fault.old) == 1
    assert fault.new != fault.old
    assert all((ROOT / test).exists() for test in fault.tests)
