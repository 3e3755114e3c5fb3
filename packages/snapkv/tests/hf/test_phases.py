"""In which phase an attention call lies: every case by hand, and all of them have one."""

import itertools

import pytest

from snapkv.hf.attention import _PHASES
from snapkv.hf.forward_context import Phase, phase_of


@pytest.mark.parametrize(
    ("seen", "new", "end", "compressed", "turns_vote", "phase"),
    [
        (10, 10, 30, False, False, Phase.READ_PROMPT),  # the first piece of a prompt
        (30, 20, 30, False, False, Phase.END_PROMPT),
        (33, 23, 30, False, False, Phase.END_PROMPT),  # with three drafts behind it
        (31, 1, 30, True, False, Phase.DECODE),
        (31, 1, 30, False, False, Phase.DECODE),  # behind a prompt that fits
        (31, 1, 30, True, True, Phase.DECODE),
        (36, 5, 40, True, False, Phase.READ_TURN),  # a piece of a later turn
        (40, 4, 40, True, False, Phase.READ_TURN),  # its end, stored whole
        (36, 5, 40, True, True, Phase.READ_TURN),
        (40, 4, 40, True, True, Phase.END_TURN),  # its end, which votes
        (42, 6, 40, True, True, Phase.END_TURN),  # with two drafts behind it
        (40, 4, 40, False, True, Phase.END_PROMPT),  # all was recalled, or nothing dropped
    ],
)
def test_phases_by_hand(seen, new, end, compressed, turns_vote, phase):
    assert phase_of(seen, new, end, is_compressed=compressed, turns_vote=turns_vote) is phase


def test_every_call_has_one_phase_and_every_phase_a_function():
    met = set()
    for seen, new, end in itertools.product(range(1, 7), range(1, 4), range(1, 7)):
        if new <= seen:
            for compressed, turns_vote in itertools.product([False, True], repeat=2):
                met.add(phase_of(seen, new, end, is_compressed=compressed, turns_vote=turns_vote))
    assert met == set(Phase)
    assert _PHASES.keys() == set(Phase)
