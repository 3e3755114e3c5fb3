"""Compactor by hand and by exact leverage, and what it refuses."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapkv import CompressedCache, InvalidArgumentError
from snapkv.ops import ScoreOptions
from snapkv.policies import Compactor, PromptLayer
from tests.families import random_ids, tiny_model
from tests.ops.oracle import attention_weights
from tests.ops.states import random_layer, rotate

RIDGE = 0.01


def exact_leverage(keys):
    """Of every key the diagonal of X (X'X + ridge)^-1 X', X the centred keys: (N, D) float64."""
    centred = keys - keys.mean(dim=0)
    inverse = torch.linalg.inv(centred.T @ centred + RIDGE * torch.eye(keys.shape[1]).double())
    return [float(key @ inverse @ key) for key in centred]


def received(queries, keys, values, chunk):
    """Attention in chunks, summed over the queries of all heads, by loops; smoothed."""
    weighed = []
    for start in range(0, len(keys), chunk):
        own = keys[start : start + chunk]
        sums = [0.0] * len(own)
        for head in queries:
            for query in head[start : start + chunk]:
                for at, weight in enumerate(attention_weights(query, own, 1.0)):
                    sums[at] += weight / len(queries)
        weighed += [
            total * math.hypot(*value)
            for total, value in zip(sums, values[start : start + chunk], strict=True)
        ]
    padded = [0.0, *weighed, 0.0]
    return [sum(padded[at : at + 3]) / 3 for at in range(len(weighed))]


def standardised(heads):
    every = [score for head in heads for score in head]
    mean = sum(every) / len(every)
    deviation = math.sqrt(sum((score - mean) ** 2 for score in every) / len(every))
    return [[(score - mean) / max(deviation, 1e-6) for score in head] for head in heads]


def plain_scores(layer, policy):
    """Of one row without pads, with exact leverage: a list per KV head, from the sinks on."""
    T = layer.keys.shape[2]
    own = slice(policy.sink_tokens, T - policy.window_size)
    raw = rotate(layer.keys, -torch.arange(T)[None])[0, :, own].double()
    group = layer.queries.shape[1] // len(raw)
    levers = standardised([exact_leverage(keys) for keys in raw])
    attention = standardised(
        [
            received(
                layer.queries[0, head * group : (head + 1) * group, own].tolist(),
                layer.keys[0, head, own].tolist(),
                layer.values[0, head, own].tolist(),
                policy.chunk_tokens,
            )
            for head in range(len(raw))
        ]
    )
    return [
        [policy.blending * one + other for one, other in zip(*pair, strict=True)]
        for pair in zip(levers, attention, strict=True)
    ]


def stated_layer(keys, values, queries):
    """One head, whose keys turn with no position."""
    states = {"keys": keys, "values": values, "queries": queries}
    return PromptLayer(
        **{name: torch.tensor([[rows]]) for name, rows in states.items()},
        score_options=ScoreOptions(scaling=1.0),
        layer_idx=0,
        rotation=lambda states, positions: states.float(),
    )


def test_by_hand():
    """Keys 1, 1, 1, -3 between a sink and the window: of leverages (1, 1, 1, 9) / 12.01.

    No query prefers a key, so in a chunk of four each receives 4 / 4; by values of 1, 4, 1 and 1
    that is 1, 4, 1, 1, and smoothed 5 / 3, 6 / 3, 6 / 3, 2 / 3. In chunks of two it is the same.
    """
    keys = [[50.0], [1.0], [1.0], [1.0], [-3.0], [70.0]]
    values = [[9.0], [1.0], [4.0], [1.0], [1.0], [9.0]]
    layer = stated_layer(keys, values, [[0.0]] * 6)
    policy = Compactor(
        4, window_size=1, sink_tokens=1, sketch_dimension=1, chunk_tokens=4, blending=0
    )
    levers = [-1 / math.sqrt(3)] * 3 + [math.sqrt(3)]  # of mean 0 and deviation 1
    spread = math.sqrt(((1 / 12) ** 2 + 2 * (5 / 12) ** 2 + (11 / 12) ** 2) / 4)
    smoothed = [5 / 3, 6 / 3, 6 / 3, 2 / 3]
    deviation = math.sqrt(sum((s - 19 / 12) ** 2 for s in smoothed) / 4)
    assert deviation == pytest.approx(spread)
    attention = [(s - 19 / 12) / deviation for s in smoothed]
    assert policy.score(layer)[0, 0].tolist() == pytest.approx([0, *attention])
    assert policy.select(layer).keep_indices.tolist() == [[[0, 2, 3, 5]]]
    halves = replace(policy, chunk_tokens=2).score(layer)[0, 0].tolist()
    assert halves == pytest.approx([0, *attention])
    blended = replace(policy, blending=1.0)
    expected = [one + other for one, other in zip(levers, attention, strict=True)]
    # The draw scales the only column, and so what the ridge weighs.
    assert blended.score(layer)[0, 0].tolist() == pytest.approx([0, *expected], abs=1e-2)
    assert replace(blended, budget=3).select(layer).keep_indices.tolist() == [[[0, 2, 5]]]
    by_leverage = replace(layer, values=torch.ones_like(layer.values))
    assert replace(blended, budget=3).select(by_leverage).keep_indices.tolist() == [[[0, 4, 5]]]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    tokens=st.integers(24, 60),
    chunk_tokens=st.integers(1, 30),
    sinks=st.integers(0, 8),
    window_size=st.integers(1, 4),
    blending=st.floats(0, 1),
    seed=st.integers(0, 10_000),
)
def test_with_as_many_columns_as_a_head_has_leverage_is_exact(
    tokens, chunk_tokens, sinks, window_size, blending, seed
):
    layer = random_layer(seed, prompt_tokens=tokens, query_tokens=tokens, sharpness=0.5)
    factor = 1e4  # beside which the ridge is nothing
    layer = replace(layer, keys=layer.keys * factor, queries=layer.queries / factor)
    policy = Compactor(
        keep_ratio=1,
        window_size=window_size,
        sink_tokens=sinks,
        sketch_dimension=8,
        chunk_tokens=chunk_tokens,
        blending=blending,
        seed=seed,
    )
    scores = policy.score(layer)[0]
    assert bool((scores[:, :sinks] == 0).all())
    for head, expected in zip(scores.tolist(), plain_scores(layer, policy), strict=True):
        assert head[sinks:] == pytest.approx(expected, abs=1e-3)


def test_the_draw_is_that_of_the_seed_and_the_layer():
    layer = random_layer(0, prompt_tokens=60, query_tokens=60)
    policy = Compactor(30, window_size=4, sketch_dimension=3)
    state = torch.get_rng_state()
    scores = policy.score(layer)
    assert torch.equal(torch.get_rng_state(), state), "nobody else's numbers are drawn"
    assert torch.equal(policy.score(layer), scores)
    assert not torch.equal(replace(policy, seed=1).score(layer), scores)
    assert not torch.equal(policy.score(replace(layer, layer_idx=1)), scores)


def test_a_turn_behind_a_prompt_that_fitted_is_refused_and_one_behind_a_cut_prompt_read():
    """Its tokens would be chosen from together with the prompt's, whose queries are gone."""
    model, policy = tiny_model("llama"), Compactor(40, window_size=8)
    for tokens in (60, 33):
        cache = CompressedCache(model, policy)
        with torch.no_grad():
            model(random_ids(1, tokens), past_key_values=cache)
            if tokens == 60:
                cache.expect_prompt(tokens + 12)
                model(random_ids(1, 12), past_key_values=cache)
                assert cache.report().kept_tokens == 52
                continue
            with pytest.raises(InvalidArgumentError, match="got compactor and a turn up to 45 tok"):
                cache.expect_prompt(tokens + 12)
