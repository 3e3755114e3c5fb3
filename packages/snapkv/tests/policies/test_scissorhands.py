"""Scissorhands by hand, its counts against loops, and the queries it looks back at.

What it shares with the other methods that evict is in `test_evicting.py`.
"""

from dataclasses import replace

import pytest
import torch

from snapkv.ops import ScoreOptions, count_above
from snapkv.policies import Scissorhands
from snapkv.policies.scissorhands import layer_budgets
from tests.ops.states import random_layer, worked_prompt, worked_step

ROWS = [
    [0.5, 0.05, 0.2, 0.1, 0.15, 0, 0],
    [0.4, 0.05, 0.25, 0.05, 0.05, 0.2, 0],
    [0.3, 0.2, 0.05, 0.05, 0.1, 0.1, 0.2],
]


def test_a_drop_by_hand():
    """Positions 5 and 6 are recent; 3 was never pivotal, 1 and 4 only once."""
    policy = Scissorhands(6, drop=3, history=3, recent=2)
    assert policy.evict(worked_step(ROWS, 7)).keep_indices.tolist() == [[[0, 2, 5, 6]]]


def test_of_equal_counts_the_oldest_goes_first():
    policy = Scissorhands(6, drop=2, history=3, recent=2)
    assert policy.evict(worked_step(ROWS, 7)).keep_indices.tolist() == [[[0, 2, 4, 5, 6]]]


def test_a_prompt_in_one_pass_is_cut_to_the_budget():
    prompt = worked_prompt(ROWS, 7)
    selection = Scissorhands(4, drop=1, history=3, recent=2).select(prompt)
    assert selection.keep_indices.tolist() == [[[0, 2, 5, 6]]]
    whole = Scissorhands(7, drop=1, history=3, recent=2).select(prompt)
    assert whole.keep_indices.tolist() == [[list(range(7))]]


def test_the_uniform_level_of_slots_is_above_that_of_tokens():
    """Seven of twenty tokens are held: 0.1 is above 1/20 and not above 1/7."""
    row = [0.3, 0.1, 0.04, 0.16, 0.1, 0.1, 0.2]
    step = worked_step([row], 7, [0, 4, 8, 12, 16, 18, 19])
    tokens, slots = (
        Scissorhands(6, drop=4, history=1, recent=1, threshold=level).evict(step).keep_indices
        for level in ("tokens", "slots")
    )
    assert tokens.tolist() == [[[4, 5, 6]]], "all but 2 tie, and the oldest go"
    assert slots.tolist() == [[[0, 3, 6]]]


def loop_counts(step, threshold, pads):
    """The definition in float64, one weight at a time."""
    B, Hq, N, _ = step.queries.shape
    S, group = step.keys.shape[2], Hq // step.keys.shape[1]
    result = torch.zeros(B, Hq, S)
    for row in range(B):
        for head in range(Hq):
            columns = step.columns[row, head * step.columns.shape[1] // Hq].tolist()
            for index in range(N):
                own = step.seen_tokens - N + index
                seen = [s for s in range(S) if pads[row] <= columns[s] <= own and columns[s] >= 0]
                query = step.queries[row, head, index].double()
                scores = {
                    s: float(query @ step.keys[row, head // group, s].double())
                    * step.score_options.scaling
                    for s in seen
                }
                total = sum(torch.tensor(score).exp() for score in scores.values())
                for s, score in scores.items():
                    above = torch.tensor(score).exp() / total > threshold[row]
                    result[row, head, s] += int(above)
    return result


@pytest.mark.parametrize("pads", [[0, 0], [5, 0], [28, 3]], ids=str)
@pytest.mark.parametrize("block_tokens", [4, 64])
def test_the_counts_equal_their_definition(pads, block_tokens):
    """Slots with gaps, some of them of tokens that came after the older queries; leading -1."""
    source = torch.Generator().manual_seed(0)
    layer = random_layer(1, batch=2, prompt_tokens=9, query_tokens=9, kv_heads=2)
    queries = torch.randn(2, 4, 11, 8, generator=source) * 2
    columns = torch.stack([torch.randperm(30, generator=source)[:9] for _ in range(4)])
    columns = columns.sort(dim=-1).values.view(2, 2, 9)
    columns[..., -1] = 30
    columns[1, :, 0] = -1
    step = replace(
        worked_step(ROWS, 7),
        queries=queries,
        keys=layer.keys,
        score_options=ScoreOptions(scaling=0.35),
        seen_tokens=31,
        columns=columns,
    )
    threshold = torch.tensor([1 / 9, 1 / 31])
    padded = replace(step, pad_tokens=torch.tensor(pads))
    got = count_above(padded, threshold, columns, 31, block_tokens=block_tokens)
    assert torch.equal(got, loop_counts(step, threshold, pads))


def test_layer_budgets_rise_and_keep_their_mean():
    assert layer_budgets(100, 0.5, 5) == (50, 75, 100, 125, 150)
    assert layer_budgets(100, 0.0, 3) == (100, 100, 100)
    assert layer_budgets(100, 0.9, 1) == (100,)
    for gamma in (0.1, 0.37, 0.8):
        budgets = layer_budgets(101, gamma, 7)
        assert sum(budgets) == 707
        assert list(budgets) == sorted(budgets)
        assert budgets[0] >= Scissorhands(101, gamma=gamma).max_decode_tokens
