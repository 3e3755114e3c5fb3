"""Every seeded fault still has a place in the source, and tests that are there."""

from pathlib import Path

import pytest

import snapkv
from tests.faults.faults import FAULTS

PACKAGE = Path(snapkv.__file__).parent


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_seeded(fault):
    assert (PACKAGE / fault.file).read_text(encoding="utf-8").count(fault.old) == 1
    assert fault.new != fault.old
    assert all(Path(test).exists() for test in fault.tests)
