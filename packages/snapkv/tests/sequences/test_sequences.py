"""Whatever is done to a cache, every row is as it is alone, and sees what it keeps and no more."""

import pytest

from tests.sequences.cases import CASES
from tests.sequences.drawing import drawn
from tests.sequences.playing import EQUAL, REFUSED, play
from tests.sequences.shrinking import shrunk

SEED, COUNT, AT_ONCE = 0, 200, 20


@pytest.mark.parametrize("name", CASES)
def test_what_failed_once_does_not_fail_again(name):
    verdict = play(CASES[name])
    assert verdict.kind in (EQUAL, REFUSED), verdict.said


@pytest.mark.parametrize("first", range(0, COUNT, AT_ONCE))
def test_random_sequences_of_operations(first):
    for number in range(first, first + AT_ONCE):
        verdict = play(drawn(SEED, number))
        if verdict.kind not in (EQUAL, REFUSED):
            sequence, verdict = shrunk(drawn(SEED, number))
            pytest.fail(f"{number}, shrunk: {sequence}\n{verdict.kind}: {verdict.said[0]}")
