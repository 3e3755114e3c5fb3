"""The phase of an attention call: worked examples, and every call has a phase."""

import itertools

import pytest

from snapkv.hf.attention import _PHASES
from snapkv.hf.forward_context import Phase, phase_of

CHOOSES_AGAIN = (None, False, True)


@pytest.mark.parametrize(
    ("seen", "new", "end", "chooses_again", "phase"),
    [
        (10, 10, 30, None, Phase.READ_PROMPT),  # the first piece of a prompt
        (30, 20, 30, None, Phase.END_PROMPT),
        (30, 1, 30, None, Phase.END_PROMPT),  # its last token, alone
        (31, 1, 30, False, Phase.DECODE),
        (31, 1, 30, None, Phase.DECODE),  # behind a prompt that fits
        (31, 1, 30, True, Phase.DECODE),
        (36, 5, 40, False, Phase.READ_TURN),  # a piece of a later turn
        (40, 4, 40, False, Phase.READ_TURN),  # its end, stored whole
        (36, 5, 40, True, Phase.READ_TURN),
        (40, 4, 40, True, Phase.END_TURN),  # its end, which votes
        (40, 4, 40, None, Phase.END_PROMPT),  # all was recalled, or nothing dropped
    ],
)
def test_phase_of_call_matches_worked_example(seen, new, end, chooses_again, phase):
    assert phase_of(seen, new, end, chooses_again) is phase


def test_every_call_has_one_phase_and_every_phase_a_function():
    calls = itertools.product(range(1, 7), range(1, 4), range(1, 7), CHOOSES_AGAIN)
    met = {phase_of(*given) for given in calls if given[1] <= given[0]}
    assert met == set(Phase) == _PHASES.keys()
