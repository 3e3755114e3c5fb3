"""One budget for the heads of all layers: the same positions are kept as by the library."""

import itertools
from dataclasses import replace

import pytest
import torch

from snapkv import default_policy
from snapkv_vllm.across_layers import select_across
from snapkv_vllm.admission.settings import ServingSettings
from tests.ops.states import random_layer
from tests.policies.reading import columns_kept

LAYERS, TOKENS = 5, 150


def layers_of(policy, seed=0, equal=False):
    """Those of a prompt, each a batch of one row; with equal votes everywhere if said so."""
    found = []
    for depth in range(LAYERS):
        layer = random_layer(
            seed + depth,
            prompt_tokens=TOKENS,
            query_tokens=policy.query_tokens,
            sharpness=1 + depth,
        )
        keys = torch.zeros_like(layer.keys) if equal else layer.keys
        found.append(replace(layer, keys=keys, layer_idx=depth, depth=depth, num_layers=LAYERS))
    return found


def runs_of(layers, sizes):
    """The same, some at a time as rows of a batch."""
    ends = list(itertools.accumulate(sizes))
    for first, end in zip([0, *ends], ends, strict=False):
        some = layers[first:end]
        states = {
            name: torch.cat([getattr(one, name) for one in some])
            for name in ("queries", "keys", "values")
        }
        yield replace(some[0], **states, received=None)


def as_mask(keep):
    mask = torch.zeros(*keep.shape[:2], TOKENS + 1, dtype=torch.bool)
    return mask.scatter(2, keep.where(keep >= 0, TOKENS), True)[..., :TOKENS]


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("sizes", [[1] * LAYERS, [LAYERS], [2, 1, 2]], ids=str)
@pytest.mark.parametrize("policy", [default_policy(40), default_policy(20), default_policy(149)])
def test_across_layers_keeps_the_same_tokens_as_the_library(policy, sizes, equal):
    layers = layers_of(policy, equal=equal)
    expected = torch.cat([as_mask(one) for one in columns_kept(policy, layers)])
    budget = policy.policy.budget
    found = torch.cat(select_across(policy, runs_of(layers, sizes), budget))
    assert torch.equal(found, expected)
    assert int(found.sum()) == budget * LAYERS * 2
    if budget == 40 and not equal:
        assert len(set(found.sum(dim=(1, 2)).tolist())) > 1, "layers differ"


def test_across_layers_applies_spans_in_every_head_and_shares_the_rest_of_the_budget():
    said = [{"start": 50, "end": 90, "do": "drop"}, {"start": 100, "end": 104, "do": "protect"}]
    settings = ServingSettings(policy="across-layers", budget=40, protect_first=3)
    policy = settings.plan_request({"snapkv_spans": said}, TOKENS).policy
    (found,) = select_across(policy, runs_of(layers_of(policy), [LAYERS]), 40)
    assert int(found.sum()) == 40 * LAYERS * 2
    assert found[..., [0, 1, 2, *range(100, 104), *range(TOKENS - 16, TOKENS)]].all()
    assert not found[..., 50:90].any()
