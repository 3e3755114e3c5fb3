"""The sketches of what was tried round, count and correct as they say."""

import pytest
import torch

from snapkv.ops import ScoreOptions
from snapkv.policies import PromptLayer
from snapkv_lab.experiments.tried import (
    SINKS,
    WINDOW,
    Tier,
    Way,
    hadamard,
    in_groups,
    ridge,
    rotated,
)


def test_groups_come_back_within_half_a_step_and_ends_exactly():
    states = torch.tensor([[0.0, 10.0], [1.0, 20.0], [3.0, 40.0]])
    assert in_groups(states, 2, 0).tolist() == [[0, 10], [1, 20], [3, 40]]
    states = torch.randn(70, 8)
    error = (in_groups(states, 4, 0) - states).abs()
    for begin in (0, 32, 64):
        part = states[begin : begin + 32]
        step = (part.amax(0) - part.amin(0)) / 15
        assert (error[begin : begin + 32] <= step / 2 + 2e-3).all()


def test_a_turn_is_orthogonal_and_a_normal_loses_what_max_says():
    turn = hadamard(64)
    assert torch.allclose(turn @ turn.T, torch.eye(64), atol=1e-6)
    states = torch.randn(500, 64, generator=torch.Generator().manual_seed(1))
    for bits, lost in ((2, 0.1175), (3, 0.03454)):  # Max (1960), table 1: 4 and 8 levels
        assert float((rotated(states, bits) - states).square().mean()) == pytest.approx(lost, 0.05)


def test_bytes_are_those_of_codes_and_scales():
    """64 channels: 64 bytes of 4 bits twice, 4 bytes a group of 32 tokens, and of 32 channels."""
    assert Tier(4, 4).token_bytes(64) == 64 + 8 + 8
    assert Tier(2, 4, turns=True).token_bytes(64) == 48 + 2 + 8
    counts = Way().counts(64, 1000, 0.25)
    assert counts == [int((250 - WINDOW - SINKS) * 256 / 80)]
    assert Way().bytes(64, counts, 1000) == pytest.approx(0.25, abs=0.001)
    two = Way(tiers=(Tier(8, 8, 0.25), Tier(4, 4, 0.75)))
    assert two.counts(64, 1000, 0.25) == [int(230 * 64 / 144), int(230 * 192 / 80)]


def test_a_ridge_brings_outputs_nearer_with_less_penalty_nearer_still():
    torch.manual_seed(0)
    keys, values, queries = (torch.randn(1, heads, 40, 16) for heads in (1, 1, 2))
    layer = PromptLayer(
        queries=queries[:, :, -5:],
        keys=keys,
        values=values,
        score_options=ScoreOptions(scaling=0.25),
        layer_idx=0,
    )
    kept = torch.tensor([0, 3, 8, 20, *range(35, 40)])
    scores = layer.queries[0] @ keys[0, 0].T * 0.25
    hidden = torch.arange(40) > torch.arange(35, 40)[:, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    whole, weights = scores.softmax(-1) @ values[0, 0], scores[..., kept].softmax(-1)
    errors = [
        float((weights @ held - whole).norm())
        for held in (
            values[0, 0, kept],
            *(ridge(layer, 0, kept, values[0, 0, kept], penalty) for penalty in (1.0, 0.01)),
        )
    ]
    assert errors[0] > errors[1] > errors[2]
