"""What was lost of the votes is measured of many layers at once, as of each by itself."""

import pytest
import torch

from snapkv import AcrossLayers, SnapKV
from snapkv.cache import lost_votes
from snapkv.policies.states import LostVotes
from tests.methods import BOTH, METHODS
from tests.ops.states import pad_left, random_layer
from tests.policies.test_across_layers import ended

VOTING = ("snapkv", "snapkv by query head", "snapkv by itself", "pyramidkv", "adakv")
POLICIES = {name: METHODS[name] for name in VOTING} | {
    "across-layers": AcrossLayers(SnapKV(**BOTH, sink_tokens=2)),
    "across-layers by the largest": AcrossLayers(SnapKV(**BOTH, window_reduce="max")),
}


@pytest.fixture
def prompts():
    """Of seven layers, two rows each, one with pads."""
    return [
        pad_left(
            [
                random_layer(9 * depth + row, prompt_tokens=tokens, query_tokens=8)
                for row, tokens in enumerate((120, 95))
            ],
            query_tokens=8,
        )
        for depth in range(7)
    ]


@pytest.mark.parametrize("most_bytes", [0, 4000, 1 << 20])
@pytest.mark.parametrize("name", POLICIES)
def test_every_layer_has_lost_what_it_holds_no_more(name, most_bytes, prompts, monkeypatch):
    monkeypatch.setattr(lost_votes, "MOST_BYTES", most_bytes)
    policy, found = POLICIES[name], []
    for layer, prompt in zip(ended(policy, prompts), prompts, strict=True):
        if layer.slots.kept is None:
            assert layer.state.lost_mass is None
            continue
        votes = policy.votes_at_stake(prompt)
        kept = layer.slots.kept.long()
        empty = layer.slots.padding_slots
        if empty is not None:
            kept = kept.masked_fill(torch.arange(kept.shape[2]) < empty[:, None, None], -1)
        lost = LostVotes.of(votes.votes, votes.lifted(), kept, prompt.keys.shape[2])
        torch.testing.assert_close(layer.state.lost_mass, lost.mass)
        torch.testing.assert_close(layer.state.lost_peak, lost.peak, rtol=0, atol=0)
        found.append(float(lost.mass.max()))
    assert max(found) > 0
