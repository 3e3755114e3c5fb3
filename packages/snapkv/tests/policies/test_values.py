"""Methods that weigh values: CriticalKV and ExpectedAttention, by examples and plain loops."""

import math
from dataclasses import dataclass, field, replace

import pytest
import torch

from snapkv import UnsupportedModelError
from snapkv.policies import CriticalKV, ExpectedAttention, PyramidKV, SnapKV
from snapkv.policies.criticalkv import projected_norms
from tests.families import random_ids, read, tiny_gpt2
from tests.ops.states import random_layer, rotate, worked_layer, worked_prompt
from tests.policies.test_selection_contract import Stated


def stated_layer(scores, values, weight):
    """Return a layer of one KV head with these scores and values, and a window of one token."""
    keys = torch.tensor([*scores, 0.0])[None, None, :, None]
    own = torch.tensor([*values, [0.0] * len(values[0])])[None, None]
    return worked_layer(keys, own, torch.zeros(1, 1, 1, 1), output_weight=torch.tensor(weight))


def test_criticalkv_equals_a_worked_example():
    # W_O v = (v0 + v1, 2 v1): L1 norms 1, 6, 3, 2, 10.
    values = [[1.0, 0.0], [0.0, 2.0], [0.0, -1.0], [2.0, 0.0], [10.0, 0.0]]
    layer = stated_layer([9.0, 2.0, 3.0, 8.0, 1.0], values, [[1.0, 1.0], [0.0, 2.0]])
    norms = projected_norms(layer, 5)
    assert norms.tolist() == [[[1.0, 6.0, 3.0, 2.0, 10.0]]]
    # Four of the prefix: 0 and 3 by score; of score times norm (-, 12, 9, -, 10) 1 and 4.
    policy = CriticalKV(Stated(5, window_size=1))
    assert kept_sets_of_one(policy, layer) == [0, 1, 3, 4, 5]
    assert kept_sets_of_one(Stated(5, window_size=1), layer) == [0, 1, 2, 3, 5]
    # Three of the prefix: the half is rounded down, so only 0 goes by score; 3 gets 16.
    assert kept_sets_of_one(CriticalKV(Stated(4, window_size=1)), layer) == [0, 1, 3, 5]
    by_score = CriticalKV(Stated(5, window_size=1), first_share=1)
    assert kept_sets_of_one(by_score, layer) == [0, 1, 2, 3, 5]


def kept_sets_of_one(policy, layer):
    return policy.select(layer).keep_indices[0, 0].tolist()


def voted_layer(received, values):
    """Return a layer of one KV head, whose queries pay `received` and the rest to themselves."""
    queries = len(received)
    rows = [[*paid, *[0.0] * query, 1 - sum(paid)] for query, paid in enumerate(received)]
    own = torch.tensor([*values, *[0.0] * queries])[None, None, :, None]
    slots = len(values) + queries
    return worked_prompt(rows, slots, values=own, output_weight=torch.ones(1, 1))


@pytest.mark.parametrize(
    "base",
    [
        lambda **options: SnapKV(kernel_size=1, **options),
        lambda **options: PyramidKV(kernel_size=1, **options),
        lambda **options: SnapKV(kernel_size=1, pooling="avg", group_reduce="sum", **options),
    ],
    ids=["snapkv", "pyramidkv", "summed"],
)
@pytest.mark.parametrize("queries", [1, 32])
def test_epsilon_is_added_to_the_mean_attention_of_the_window(base, queries):
    """Attention is 0.5, 0.0002 and 0; norms are 1, 1 and 2.5. The first token is kept by score.

    (0.0002 + 0.0001) * 1 = 0.0003 is more than 0.0001 * 2.5 = 0.00025, but less than 0.0001 * 3.5,
    however many queries vote. A sum over 32 of them would be 0.0064: no norm here would do.
    """
    attention = [[0.5, 0.0002, 0.0]] * queries
    policy = CriticalKV(base(budget=2 + queries, window_size=queries))
    window = list(range(3, 3 + queries))
    small = voted_layer(attention, [1.0, 1.0, 2.5])
    assert policy.score(small)[0, 0, 1:].tolist() == pytest.approx([3e-4, 2.5e-4], rel=1e-3)
    assert kept_sets_of_one(policy, small) == [0, 1, *window]
    large = voted_layer(attention, [1.0, 1.0, 3.5])
    assert kept_sets_of_one(policy, large) == [0, 2, *window]


@pytest.mark.parametrize("higher", [1, 3])
def test_rounding_does_not_decide_between_two_positions_of_the_same_token(higher):
    """Its values differ by rounding in a batch and alone, so the lower position is kept."""
    values = [1.0, 2.1, 1.0, 2.1, 1.0]
    values[higher] = math.nextafter(2.1, 3.0) * (1 + 2**-23)
    policy = CriticalKV(SnapKV(3, window_size=1, kernel_size=1), first_share=0.5)
    assert kept_sets_of_one(policy, voted_layer([[0.5, *[0.1] * 4]], values)) == [0, 1, 5]


def test_value_norm_is_the_mean_over_the_query_heads_of_a_kv_head():
    layer = random_layer(3, query_heads=4, kv_heads=2, prompt_tokens=9, query_tokens=4)
    norms = projected_norms(layer, 7)
    for head in range(4):
        part = layer.output_weight[:, head * 8 : head * 8 + 8]
        for position in range(7):
            value = layer.values[0, head // 2, position]
            expected = sum(abs(float(row @ value)) for row in part)
            assert math.isclose(float(norms[0, head, position]), expected, rel_tol=1e-4)


def test_layer_without_a_fitting_output_projection_is_refused():
    layer = random_layer(0, prompt_tokens=50, query_tokens=6)
    for weight, got in ((None, "got none"), (torch.zeros(4, 5), "got one of 5 inputs")):
        other = replace(layer, output_weight=weight)
        with pytest.raises(UnsupportedModelError, match=got):
            CriticalKV(SnapKV(16, window_size=6)).select(other)


@dataclass(frozen=True)
class Recording(CriticalKV):
    """Records the layers that it scores."""

    seen: list = field(default_factory=list, kw_only=True)

    def score(self, layer):
        self.seen.append(layer)
        return super().score(layer)


def test_norms_use_the_transposed_output_projection_of_gpt2():
    model, policy = tiny_gpt2(), Recording(Stated(20, window_size=4))
    read(model, policy, random_ids(1, 40) % 64)
    layer = policy.seen[0]
    projection = model.transformer.h[0].attn.c_proj
    states = torch.zeros(1, 32)
    states[0, 16:] = layer.values[0, 1, 5]
    expected = (projection(states) - projection.bias).abs().sum()
    torch.testing.assert_close(projected_norms(layer, 10)[0, 1, 5], expected.detach())


def expected_attention_by_loops(layer, policy):
    """Compute the scores by their definition in float64, averaged over all future positions."""
    (_, heads, count, size), total = layer.queries.shape, layer.keys.shape[2]
    group = heads // layer.keys.shape[1]
    scores = torch.zeros(layer.keys.shape[1], total, dtype=torch.float64)
    turns = [turn(size, total + step) for step in range(policy.future_tokens)]
    average = sum(turns) / len(turns)
    for head in range(heads):
        raw = [
            turn(size, -(total - count + i)) @ layer.queries[0, head, i].double()
            for i in range(count)
            if total - count + i >= policy.sink_tokens
        ]
        mean = sum(raw) / len(raw)
        covariance = sum(torch.outer(q - mean, q - mean) for q in raw) / len(raw)
        mean, covariance = average @ mean, average @ covariance @ average.T
        weights = []
        for position in range(policy.sink_tokens, total):
            key = layer.keys[0, head // group, position].double()
            scaling = layer.score_options.scaling
            logit = key @ mean * scaling + key @ covariance @ key * scaling**2 / 2
            weights.append(math.exp(logit))
        for position, weight in enumerate(weights, start=policy.sink_tokens):
            norm = float(layer.values[0, head // group, position].double().norm())
            scores[head // group, position] += weight / sum(weights) * norm / group
    return scores[:, policy.sink_tokens : total - policy.window_size]


def turn(size, position):
    """Return the rotation by a position as a matrix."""
    basis = torch.eye(size)[None, None]
    return rotate(basis, torch.full((1, size), position))[0, 0].T.double()


@pytest.mark.parametrize("future_tokens", [1, 100])
def test_expected_attention_equals_its_definition(future_tokens):
    policy = ExpectedAttention(16, window_size=6, future_tokens=future_tokens)
    layer = random_layer(1, prompt_tokens=30, query_tokens=30, sharpness=1.0)
    got = policy.score(layer)
    expected = expected_attention_by_loops(layer, policy)
    torch.testing.assert_close(got[0, :, 4:].double(), expected, atol=1e-5, rtol=1e-3)
    assert (got[0, :, :4] == 0).all(), "the first four take no part"


def test_expected_attention_equals_a_worked_example():
    """Queries (1, 0) and (3, 0), without rotation, have mean (2, 0) and variance 1 along x."""
    layer = worked_layer(
        keys=torch.tensor([[[[1.0, 5.0], [-1.0, 0.0], [0.0, 9.0], [0.0, 0.0]]]]),
        values=torch.tensor([[[[3.0, 4.0], [0.0, 1.0], [2.0, 0.0], [7.0, 0.0]]]]),
        queries=torch.tensor([[[[1.0, 0.0], [3.0, 0.0]]]]),
        scaling=0.5,
        rotation=lambda states, _: states.float(),
    )
    policy = ExpectedAttention(2, window_size=1, sink_tokens=0)
    # k.mu / 2 + k'Sigma k / 8: 1.125, -0.875, 0, 0; norms of values 5, 1, 2.
    weights = [math.exp(1.125), math.exp(-0.875), 1.0, 1.0]
    expected = [w / sum(weights) * norm for w, norm in zip(weights, (5.0, 1.0, 2.0), strict=False)]
    assert policy.score(layer)[0, 0].tolist() == pytest.approx(expected, rel=1e-5)
