"""Budgets that differ between layers and heads: worked examples and exact sums."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapkv import CompressedCache
from snapkv.ops.ragged import api as ragged
from snapkv.policies import AdaKV, SnapKV
from snapkv.policies.budget import largest_remainder
from snapkv.policies.pyramidkv import exact_budgets, published_budgets
from snapkv.token_cost import share_of
from tests.families import call, random_ids, tiny_model
from tests.methods import METHODS
from tests.ops.states import layer_with_scores


def test_new_tokens_do_not_copy_the_kept_states_of_ragged_heads(monkeypatch):
    """A new token copies only the tokens after the prompt."""
    monkeypatch.setattr(ragged, "FLASH_ELEMENTS", 0)
    model = tiny_model("llama")
    cache = CompressedCache(model, METHODS["adakv"])
    call(model, cache, random_ids(2, 80))
    storages = {layer.keys.untyped_storage().nbytes() for layer in cache.layers}
    assert max(storages) <= max(layer.held_bytes for layer in cache.layers), "no view of the prompt"
    noted = cache.report()["index_bytes"]
    before = [
        (layer.store.ragged.keys.data_ptr(), layer.store.ragged.layout) for layer in cache.layers
    ]
    for step in range(3):
        call(model, cache, random_ids(2, 1, seed=step))
    for layer, (keys, layout) in zip(cache.layers, before, strict=True):
        assert layer.store.ragged.keys.data_ptr() == keys
        assert layer.store.ragged.layout is layout
    pieces = sum(layer.store.ragged.layout.held_bytes for layer in cache.layers)
    assert cache.report()["index_bytes"] - noted == pieces > 0


# Allocation, by hand and in general.


def test_published_pyramid_budgets_equal_those_of_kvcache_factory():
    """Capacity 128, window 8, 32 layers and 12,000 tokens give 4,016 positions and not 3,840."""
    budgets = published_budgets(120, 11_992, 32, 20)
    assert (budgets[0], budgets[1], budgets[-1]) == (234, 227, 17)
    assert sum(budgets) == 4016


@settings(deadline=None, derandomize=True)
@given(
    mean=st.integers(0, 300),
    spare=st.integers(0, 5000),
    num_layers=st.integers(1, 90),
    beta=st.integers(1, 40),
    least=st.integers(0, 9),
)
def test_exact_pyramid_budgets_fall_and_add_up_to_the_total(mean, spare, num_layers, beta, least):
    least = min(mean, least)
    budgets = exact_budgets(mean, mean + spare, num_layers, beta, least)
    assert sum(budgets) == mean * num_layers
    assert max(budgets) <= mean + spare
    assert min(budgets) >= least
    assert list(budgets) == sorted(budgets, reverse=True)
    if beta == 1:
        assert set(budgets) == {mean}


@pytest.mark.parametrize(
    ("safeguard", "expected"), [(1.0, (2, 2)), (0.5, (2, 2)), (0.2, (3, 1)), (0.01, (3, 1))]
)
def test_adakv_budgets_of_heads_equal_a_worked_example(safeguard, expected):
    """The heads have 3 and 1 of the best four scores; a safeguard of a fifth gives 2.8 and 1.2."""
    layer = layer_with_scores([[0.5, 0.3, 0.1, 0.05], [0.2, 0.02, 0.01, 0.01]])
    policy = AdaKV(SnapKV(3, window_size=1, kernel_size=1), safeguard=safeguard)
    selection = policy.select(layer)
    shares = tuple((selection.head_tokens[0] - 1).tolist())
    assert shares == expected


@pytest.mark.parametrize(
    ("shares", "total", "expected"),
    [
        ([2.5, 1.5], 4, [2, 2]),  # of equal remainders the smaller share gains
        ([2.4, 0.8], 3, [2, 1]),
        ([1.0, 2.0], 3, [1, 2]),
        ([0.3, 0.3, 0.4], 1, [0, 0, 1]),
    ],
)
def test_largest_remainder_equals_a_worked_example(shares, total, expected):
    assert largest_remainder(shares, total) == expected


@pytest.mark.parametrize("percent", [1, 7, 29, 35, 57, 58, 100])
def test_share_of_tokens_is_rounded_down_from_its_decimal_value(percent):
    for tokens in range(300):
        assert share_of(tokens, percent / 100) == percent * tokens // 100
