"""The text of every seeded fault is in the source, and its suites exist."""

from pathlib import Path

import pytest

from tests.faults.faults import FAULTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_can_be_seeded(fault):
    (path,) = ROOT.glob(f"packages/*/src/{fault.file}")
    assert path.read_text(encoding="utf-8").count(fault.old) == 1
    assert fault.new != fault.old
    assert fault.suites
    assert all((ROOT / fault.path_of(suite)).exists() for suite in fault.suites)


def test_names_of_faults_are_unique():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
