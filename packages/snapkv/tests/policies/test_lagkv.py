"""LagKV by hand, by loops over Python floats, and where a piece has no lag."""

import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapkv.policies import LagKV
from tests.ops.states import random_layer, worked_layer


def stand_out(piece, lag):
    """The rating of every token of a piece by one kind of its states: lists of channels."""
    deviations = []
    for token in piece:
        scaled = []
        for channel, value in enumerate(token):
            column = [other[channel] for other in lag]
            reach = max(column) - min(column)
            scaled.append((value - min(column)) / reach if reach else 0.0)
        deviations.append(statistics.stdev(scaled))
    powers = [math.exp(deviation - max(deviations)) for deviation in deviations]
    return [power / sum(powers) for power in powers]


def plain_scores(keys, values, lag_size, sinks, cross_scoring):
    """The score of every position of one head; lists of tokens, each a list of channels."""
    scores = [0.0] * min(sinks, len(keys))
    start = sinks
    while start + 2 * lag_size <= len(keys):
        behind = start + lag_size
        rated = [
            stand_out(states[start:behind], states[behind : behind + lag_size])
            for states in (keys, values)
        ]
        ratings = [(one + other) / 2 for one, other in zip(*rated, strict=True)]
        if not cross_scoring:
            worst_first = sorted(range(lag_size), key=lambda at: (ratings[at], -at))
            ratings = [(worst_first.index(at) + ratings[at]) / lag_size for at in range(lag_size)]
        scores += ratings
        start = behind
    return scores + [1 + (at + 1) / len(keys) for at in range(len(scores), len(keys))]


LAG = [[1.0, 0.0], [3.0, 4.0]]
"""Two tokens whose channels reach from 1 to 3 and from 0 to 4."""

FAR, NEAR = [3.0, 0.0], [2.0, 2.0]
"""Scaled by it (1, 0), which deviates by the root of a half, and (0.5, 0.5), which does not."""


def test_by_hand():
    """A sink, the pieces (FAR, NEAR) and LAG, and a token that fills none; a window of one."""
    layer = worked_layer(torch.tensor([[[[9.0, -9.0], FAR, NEAR, *LAG, [5.0, 5.0]]]]))
    policy = LagKV(4, window_size=1, lag_size=2, sink_tokens=1)
    power = math.exp(math.sqrt(0.5))
    far, near = power / (power + 1), 1 / (power + 1)
    no_lag = [1 + 4 / 6, 1 + 5 / 6]
    ranked = policy.score(layer)[0, 0].tolist()
    assert ranked == pytest.approx([0, (1 + far) / 2, (0 + near) / 2, *no_lag])
    rated = replace(policy, cross_scoring=True).score(layer)[0, 0].tolist()
    assert rated == pytest.approx([0, far, near, *no_lag])
    # Beside the sink and the window there is room for two: what has no lag. Then FAR, then NEAR.
    assert policy.select(layer).keep_indices.tolist() == [[[0, 3, 4, 5]]]
    assert replace(policy, budget=5).select(layer).keep_indices.tolist() == [[[0, 1, 3, 4, 5]]]
    assert replace(policy, budget=3).select(layer).keep_indices.tolist() == [[[0, 4, 5]]]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tokens=st.integers(1, 60),
    lag_size=st.integers(2, 12),
    sinks=st.integers(0, 6),
    cross_scoring=st.booleans(),
    flat=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_scores_are_those_of_loops_over_floats(tokens, lag_size, sinks, cross_scoring, flat, seed):
    layer = random_layer(seed, prompt_tokens=tokens, query_tokens=1)
    if flat:  # a channel that varies nowhere
        layer = replace(layer, keys=layer.keys.index_fill(3, torch.tensor([2]), 0.5))
    policy = LagKV(
        keep_ratio=1,
        window_size=1,
        lag_size=lag_size,
        sink_tokens=sinks,
        cross_scoring=cross_scoring,
    )
    scores = policy.score(layer)
    for head in range(2):
        keys, values = layer.keys[0, head].tolist(), layer.values[0, head].tolist()
        expected = plain_scores(keys, values, lag_size, sinks, cross_scoring)[:-1]
        assert scores[0, head].tolist() == pytest.approx(expected, abs=1e-5)


def test_heads_that_share_a_latent_are_rated_together():
    layer = random_layer(3, prompt_tokens=40, query_tokens=1)
    policy = LagKV(20, window_size=4, lag_size=6, cross_scoring=True)
    shared = policy.score(replace(layer, stored_heads=1))
    own = policy.score(layer)
    assert shared.shape == (1, 1, 36)
    torch.testing.assert_close(shared, own.mean(dim=1, keepdim=True))
