"""After any sequence of operations, each row is as if read alone and sees only what it keeps."""

import os
from dataclasses import replace

import pytest

from tests.sequences.cases import CASES
from tests.sequences.drawing import drawn
from tests.sequences.playing import EQUAL, REFUSED, play

SEED, COUNT = int(os.environ.get("SEED", "0")), int(os.environ.get("SEQUENCES", "260"))
AT_ONCE = 20
FINE = (EQUAL, REFUSED)


def shortened(sequence):
    """Remove what the failure does not need; return the shorter sequence and its verdict."""
    verdict = play(sequence)
    for part in ("operations", "options"):
        for place in reversed(range(len(getattr(sequence, part)))):
            whole = getattr(sequence, part)
            items = list(whole.items() if part == "options" else whole)
            left = items[:place] + items[place + 1 :]
            shorter = replace(sequence, **{part: dict(left) if part == "options" else tuple(left)})
            found = play(shorter)
            if found.kind == verdict.kind:
                sequence, verdict = shorter, found
    return sequence, verdict


@pytest.mark.parametrize("name", CASES)
def test_formerly_failing_sequence_passes(name):
    verdict = play(CASES[name])
    assert verdict.kind in FINE, verdict.said


@pytest.mark.parametrize("first", range(0, COUNT, AT_ONCE))
def test_random_sequences_match_rows_read_alone_and_oracle(first):
    for number in range(first, first + AT_ONCE):
        sequence = drawn(SEED, number)
        if play(sequence).kind not in FINE:
            sequence, verdict = shortened(sequence)
            pytest.fail(f"{number}: {sequence}\n{verdict.kind}: {verdict.said[0]}")
