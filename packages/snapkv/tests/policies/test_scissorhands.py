"""Scissorhands by worked examples, and the budgets of its layers.

What it shares with the other methods that evict is in `test_evicting.py`.
"""

from snapkv.policies import Scissorhands
from snapkv.policies.scissorhands import layer_budgets
from tests.ops.states import worked_prompt, worked_step

ROWS = [
    [0.5, 0.05, 0.2, 0.1, 0.15, 0, 0],
    [0.4, 0.05, 0.25, 0.05, 0.05, 0.2, 0],
    [0.3, 0.2, 0.05, 0.05, 0.1, 0.1, 0.2],
]


def test_eviction_equals_a_worked_example():
    """Positions 5 and 6 are recent; position 3 was never pivotal, and 1 and 4 only one time."""
    policy = Scissorhands(6, drop=3, history=3, recent=2)
    assert policy.evict(worked_step(ROWS, 7)).keep_indices.tolist() == [[[0, 2, 5, 6]]]


def test_oldest_of_equally_pivotal_tokens_is_evicted_first():
    policy = Scissorhands(6, drop=2, history=3, recent=2)
    assert policy.evict(worked_step(ROWS, 7)).keep_indices.tolist() == [[[0, 2, 4, 5, 6]]]


def test_prompt_read_in_one_pass_is_evicted_to_the_budget():
    prompt = worked_prompt(ROWS, 7)
    selection = Scissorhands(4, drop=1, history=3, recent=2).select(prompt)
    assert selection.keep_indices.tolist() == [[[0, 2, 5, 6]]]
    whole = Scissorhands(7, drop=1, history=3, recent=2).select(prompt)
    assert whole.keep_indices.tolist() == [[list(range(7))]]


def test_threshold_by_slots_is_higher_than_by_tokens():
    """Seven of twenty tokens are held: 0.1 is above 1/20 and not above 1/7."""
    row = [0.3, 0.1, 0.04, 0.16, 0.1, 0.1, 0.2]
    step = worked_step([row], 7, [0, 4, 8, 12, 16, 18, 19])
    tokens, slots = (
        Scissorhands(6, drop=4, history=1, recent=1, threshold=level).evict(step).keep_indices
        for level in ("tokens", "slots")
    )
    assert tokens.tolist() == [[[4, 5, 6]]], "all but 2 tie, and the oldest go"
    assert slots.tolist() == [[[0, 3, 6]]]


def test_layer_budgets_rise_and_have_the_given_mean():
    assert layer_budgets(100, 0.5, 5) == (50, 75, 100, 125, 150)
    assert layer_budgets(100, 0.0, 3) == (100, 100, 100)
    assert layer_budgets(100, 0.9, 1) == (100,)
    for gamma in (0.1, 0.37, 0.8):
        budgets = layer_budgets(101, gamma, 7)
        assert sum(budgets) == 707
        assert list(budgets) == sorted(budgets)
        assert budgets[0] >= Scissorhands(101, gamma=gamma).max_decode_tokens
