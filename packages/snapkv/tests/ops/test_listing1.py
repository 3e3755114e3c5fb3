"""`SnapKV(group_reduce="none")` keeps the set of the paper's Listing 1.

Both sides compute in float32, in different orders, so a position may differ where its pooled vote
lies at the cut: exactly (the plateaus of max pooling: `topk` promises no order among equals) or up
to rounding. What rounding can do is measured on every input, not guessed: the tolerance is twice
the largest distance between the float32 listing and the same listing in float64.
"""

import pytest
import torch

from snapkv.policies import SnapKV
from tests.ops.listing1 import listing_kept, listing_scores, repeat_keys
from tests.ops.states import random_layer
from tests.pairs import pairs

KEPT_OF_PREFIX = 24
HEADS = {"mha": (2, 2), "gqa": (4, 2)}


def our_kept(policy, layer):
    """The kept positions of every (row, query head), as sets."""
    selection = policy.select(layer)
    batch, heads, prompt_tokens, _ = layer.queries.shape[:2] + layer.keys.shape[2:]
    if selection is None:
        return [set(range(prompt_tokens))] * (batch * heads)
    assert selection.keep_indices.shape[:2] == (batch, heads)
    return [set(kept) for kept in selection.keep_indices.flatten(0, 1).tolist()]


def assert_equal_up_to_ties(ours, listed, exact_scores, budget, tolerance):
    """Every position that only one side keeps must lie at the cut."""
    assert len(ours) == len(listed) == exact_scores.shape[0] * exact_scores.shape[1]
    for our_set, listed_set, scores in zip(ours, listed, exact_scores.flatten(0, 1), strict=True):
        assert len(our_set) == len(listed_set) == budget
        prefix_tokens = scores.shape[0]
        window = set(range(prefix_tokens, max(listed_set) + 1))
        assert window <= our_set
        cut = scores.sort(descending=True).values[len(our_set - window) - 1]
        for position in our_set ^ listed_set:
            assert abs(scores[position] - cut) <= tolerance


@pairs(
    beyond_budget=[-3, 0, 1, 70],
    dtype=[torch.float32, torch.bfloat16],
    pooling=["max", "avg"],
    window_size=[16, 32, 64],
    kernel_size=[1, 5, 7, 13],
    heads=list(HEADS),
)
def test_keeps_the_set_of_listing_1(beyond_budget, dtype, pooling, window_size, kernel_size, heads):
    budget = window_size + KEPT_OF_PREFIX
    prompt_tokens = budget + beyond_budget
    query_heads, kv_heads = HEADS[heads]
    policy = SnapKV(
        budget=budget,
        window_size=window_size,
        kernel_size=kernel_size,
        pooling=pooling,
        group_reduce="none",
    )
    for seed in range(2):
        layer = random_layer(
            seed,
            query_heads=query_heads,
            kv_heads=kv_heads,
            prompt_tokens=prompt_tokens,
            query_tokens=window_size,
            head_dim=16,
            dtype=dtype,
        )
        single, double = (
            listing_scores(
                layer.queries,
                repeat_keys(layer.keys, query_heads),
                window_size=window_size,
                kernel_size=kernel_size,
                pooling=pooling,
                dtype=precision,
            )
            for precision in (torch.float32, torch.float64)
        )
        listed = listing_kept(single, prompt_tokens=prompt_tokens, capacity=budget)
        ours = our_kept(policy, layer)
        if beyond_budget <= 0:
            assert ours == listed == [set(range(prompt_tokens))] * query_heads
            continue
        tolerance = 2 * float((single - double).abs().max())
        assert 0 < tolerance < 1e-4
        assert_equal_up_to_ties(ours, listed, double, budget, tolerance)


def test_the_comparison_refuses_a_position_off_the_cut():
    scores = torch.tensor([[[0.9, 0.5, 0.1]]], dtype=torch.float64)
    assert_equal_up_to_ties([{0, 3}], [{0, 3}], scores, 2, 1e-6)
    with pytest.raises(AssertionError):
        assert_equal_up_to_ties([{1, 3}], [{0, 3}], scores, 2, 1e-6)
