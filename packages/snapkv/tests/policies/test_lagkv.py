"""LagKV by worked examples, with shared latents and with pieces that have no lag."""

import math
from dataclasses import replace

import pytest
import torch

from snapkv.policies import LagKV
from tests.ops.states import random_layer, worked_layer

LAG = [[1.0, 0.0], [3.0, 4.0]]
"""Two tokens whose channels reach from 1 to 3 and from 0 to 4."""

FAR, NEAR = [3.0, 0.0], [2.0, 2.0]
"""Scaled by it (1, 0), which deviates by the root of a half, and (0.5, 0.5), which does not."""


def test_scores_and_selection_equal_a_worked_example():
    """The prompt has a sink, the pieces (FAR, NEAR) and LAG, and a window of one token."""
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


def test_score_of_a_shared_latent_is_the_mean_over_its_heads():
    layer = random_layer(3, prompt_tokens=40, query_tokens=1)
    policy = LagKV(20, window_size=4, lag_size=6, cross_scoring=True)
    shared = policy.score(replace(layer, stored_heads=1))
    own = policy.score(layer)
    assert shared.shape == (1, 1, 36)
    torch.testing.assert_close(shared, own.mean(dim=1, keepdim=True))


def test_channel_that_does_not_vary_in_the_lag_counts_as_zero():
    """Both channels are equal for both tokens of the second piece, the lag of the first."""
    layer = worked_layer(torch.tensor([[[FAR, NEAR, LAG[0], LAG[0], [5.0, 5.0]]]]))
    policy = LagKV(4, window_size=1, lag_size=2, sink_tokens=0, cross_scoring=True)
    assert policy.score(layer)[0, 0, :2].tolist() == [0.5, 0.5]
