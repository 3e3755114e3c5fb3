"""The random baseline repeats its selection and keeps every position equally often."""

from dataclasses import replace

import torch

from snapkv.policies import Random
from tests.ops.states import random_layer


def states(tokens=60, batch=1, kv_heads=2, seed=0):
    return random_layer(seed, batch=batch, kv_heads=kv_heads, prompt_tokens=tokens, query_tokens=4)


def kept(policy, layer):
    return policy.select(layer).keep_indices.tolist()


def test_random_selection_does_not_depend_on_the_prompt():
    policy = Random(budget=20, window_size=4)
    assert kept(policy, states(seed=0)) == kept(policy, states(seed=1))


def test_random_selection_differs_between_seeds_layers_and_heads():
    layer = states()
    first = kept(Random(budget=20, window_size=4), layer)[0]
    other_seed = kept(Random(budget=20, window_size=4, seed=1), layer)[0]
    other_layer = kept(Random(budget=20, window_size=4), replace(layer, layer_idx=1))[0]
    draws = [tuple(head) for head in (*first, *other_seed, *other_layer)]
    assert len(set(draws)) == len(draws) == 6


def test_random_selection_neither_uses_nor_changes_the_global_generator():
    policy = Random(budget=20, window_size=4)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = kept(policy, states())
    torch.manual_seed(2)
    assert kept(policy, states()) == first
    torch.manual_seed(1)
    policy.select(states())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_random_selection_keeps_every_position_about_equally_often():
    """Every position before the window is kept about as often as any other."""
    layer = states(tokens=44, kv_heads=4)
    counts = torch.zeros(44)
    for seed in range(200):
        for head in kept(Random(budget=14, window_size=4, seed=seed), layer)[0]:
            counts[head] += 1
    assert (counts[40:] == 800).all()
    # 800 draws at 10 of 40: mean 200, standard deviation 12.2; five of them
    assert counts[:40].sum() == 8000
    assert 139 < counts[:40].min() <= counts[:40].max() < 261
