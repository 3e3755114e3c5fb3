"""`SnapKV.select` keeps exactly what the loop-written oracle keeps, in every mode.

Selections are compared exactly, ties included, since both give a tie to the lower position. That
is only fair where rounding cannot decide, so every example asserts that the oracle's cut is
further from the next score than rounding reaches (`ROUNDING` per voting query).
"""

import math
from dataclasses import replace

import pytest
import torch

from snapkv import ops
from snapkv.ops.votes import reference
from snapkv.policies import SnapKV
from tests.ops import oracle
from tests.ops.listing1 import listing_kept, listing_scores, repeat_keys
from tests.ops.states import random_layer
from tests.pairs import pairs

ROUNDING = 1e-6
"""Per voting query: four times the worst float32 error of a vote over 120 seeds (2.5e-7)."""


def oracle_scores(layer, policy, row=0):
    options = layer.score_options
    return oracle.pooled_scores(
        layer.queries[row].tolist(),
        layer.keys[row].tolist(),
        scaling=options.scaling,
        softcap=options.softcap,
        sinks=None if options.sink_logits is None else options.sink_logits.tolist(),
        kernel_size=policy.kernel_size,
        pooling=policy.pooling,
        decay=policy.decay,
        group_reduce=policy.group_reduce,
        window_reduce=policy.window_reduce,
        first_tokens=policy.sink_tokens,
    )


def oracle_kept(layer, policy, row=0):
    """Return the positions that the oracle keeps in an unpadded row, as a list for each head."""
    prompt_tokens = layer.keys.shape[2]
    heads = layer.queries.shape[1] if policy.group_reduce == "none" else layer.keys.shape[1]
    if prompt_tokens <= policy.window_size:
        return [list(range(prompt_tokens))] * heads
    keep = oracle.kept_prefix_tokens(
        prompt_tokens, policy.window_size, policy.budget, policy.keep_ratio
    )
    sinks = policy.sink_tokens
    scores = [
        [math.inf] * len(head[:sinks]) + head[sinks:] for head in oracle_scores(layer, policy, row)
    ]
    for head in scores:
        assert oracle.cut_gap(head, keep) > ROUNDING * policy.window_size, "choose another seed"
    return [oracle.kept_positions(head, prompt_tokens, keep) for head in scores]


def our_kept(selection, layer, row=0):
    """Return the positions of one row that `selection` keeps, counted after its padding."""
    pads = 0 if layer.pad_tokens is None else int(layer.pad_tokens[row])
    filler = 0 if selection.padding_slots is None else int(selection.padding_slots[row])
    indices = selection.keep_indices[row]
    assert (indices[:, :filler] < pads).all(), "a filler must be a pad"
    return [[slot - pads for slot in head] for head in indices[:, filler:].tolist()]


@pairs(
    beyond_budget=[-3, 0, 1, 70],
    dtype=[torch.float32, torch.bfloat16],
    pooling=["max", "avg"],
    window_size=[16, 32, 64],
    kernel_size=[1, 5, 7, 13],
    heads={"mha": (2, 2), "gqa": (4, 2)},
)
def test_kept_positions_equal_the_oracle_and_listing_1_of_the_paper(
    beyond_budget, dtype, pooling, window_size, kernel_size, heads
):
    """The sets may differ in ties at the cut, because `topk` of the listing orders ties freely."""
    (query_heads, kv_heads), budget = heads, window_size + 24
    policy = SnapKV(
        budget,
        window_size=window_size,
        kernel_size=kernel_size,
        pooling=pooling,
        group_reduce="none",
    )
    tokens = {"prompt_tokens": budget + beyond_budget, "query_tokens": window_size}
    layer = random_layer(1, query_heads=query_heads, kv_heads=kv_heads, dtype=dtype, **tokens)
    scores = listing_scores(
        layer.queries,
        repeat_keys(layer.keys, query_heads),
        window_size=window_size,
        kernel_size=kernel_size,
        pooling=pooling,
    )
    if beyond_budget <= 0:
        assert policy.select(layer) is None
    else:
        torch.testing.assert_close(torch.tensor(oracle_scores(layer, policy)).double(), scores[0])
        assert our_kept(policy.select(layer), layer) == oracle_kept(layer, policy)
    listed = listing_kept(scores, prompt_tokens=tokens["prompt_tokens"], capacity=budget)
    for own, other, votes in zip(oracle_kept(layer, policy), listed, scores[0], strict=True):
        assert len(own) == len(other) == min(budget, tokens["prompt_tokens"])
        differ = votes[sorted(other.symmetric_difference(own))]
        assert not differ.numel() or differ.max() - differ.min() < 1e-12


POOLINGS = [
    *(
        {"pooling": how, "kernel_size": kernel}
        for how in ("max", "avg")
        for kernel in (1, 5, (0, 6), (4, 1))
    ),
    {"pooling": "fading", "decay": 0.8},
    {"pooling": "fading", "decay": 0.8, "sink_tokens": 0},
    {"kernel_size": (0, 4), "sink_tokens": 2},
]


@pairs(
    window_reduce=["mean", "max"],
    group_reduce=["mean", "max", "sum", "none"],
    pooling=POOLINGS,
    with_sinks=[False, True],
    softcap=[None, 3.0],
)
def test_every_mode_equals_the_oracle(window_reduce, group_reduce, pooling, with_sinks, softcap):
    reduced = {"window_reduce": window_reduce, "group_reduce": group_reduce}
    policy = SnapKV(budget=18, window_size=6, **reduced, **pooling)
    layer = random_layer(
        22,
        batch=2,
        query_heads=6,
        prompt_tokens=45,
        query_tokens=6,
        softcap=softcap,
        with_sinks=with_sinks,
    )
    selection = policy.select(layer)
    assert selection.padding_slots is None
    for row in range(2):
        assert our_kept(selection, layer, row) == oracle_kept(layer, policy, row)


@pytest.mark.parametrize("group_reduce", ["mean", "max", "sum"])
def test_heads_that_share_a_stored_latent_vote_together(group_reduce):
    """In latent attention, every head has its own keys, and the cache stores one latent for all."""
    policy = SnapKV(budget=18, window_size=6, kernel_size=3, group_reduce=group_reduce)
    layer = random_layer(4, query_heads=4, kv_heads=4, prompt_tokens=45, query_tokens=6)
    votes = [
        oracle.head_votes(queries, keys, layer.score_options.scaling)
        for queries, keys in zip(layer.queries[0].tolist(), layer.keys[0].tolist(), strict=True)
    ]
    scores = oracle.pool(oracle.reduce_group(votes, group_reduce), 3, "max")
    assert oracle.cut_gap(scores, 12) > ROUNDING * 6
    selection = policy.select(replace(layer, stored_heads=1))
    assert our_kept(selection, layer) == [oracle.kept_positions(scores, 45, 12)]


@pytest.mark.parametrize("group_reduce", ["mean", "none"])
def test_fewer_queries_than_the_window_vote_on_the_prefix_only(group_reduce):
    """Tokens of the window that cast no vote are kept, too."""
    policy = SnapKV(budget=18, window_size=6, kernel_size=3, group_reduce=group_reduce)
    layer = random_layer(4, prompt_tokens=45, query_tokens=6)
    layer = replace(layer, queries=layer.queries[:, :, -2:])
    looped = oracle.pooled_scores(
        layer.queries[0].tolist(),
        layer.keys[0].tolist(),
        scaling=layer.score_options.scaling,
        kernel_size=1,
        pooling="max",
        group_reduce=group_reduce,
    )
    scores = [oracle.pool(head[:39], 3, "max") for head in looped]
    assert all(oracle.cut_gap(head, 12) > ROUNDING * 2 for head in scores)
    expected = [oracle.kept_positions(head, 45, 12) for head in scores]
    assert our_kept(policy.select(layer), layer) == expected


@pairs(window_reduce=["mean", "max"], voters=[2, 6, 16], group_reduce=["mean", "max", "none"])
def test_any_number_of_voters_equals_the_oracle(window_reduce, voters, group_reduce):
    """Voters vote on all positions before the window, including those of other voters."""
    reduced = {"window_reduce": window_reduce, "group_reduce": group_reduce}
    policy = SnapKV(budget=18, window_size=6, kernel_size=1, voters=voters, **reduced)
    assert policy.query_tokens == voters
    layer = random_layer(4, prompt_tokens=45, query_tokens=voters)
    expected = []
    for head, queries in enumerate(layer.queries[0].tolist()):
        rows = [
            oracle.attention_weights(
                query, layer.keys[0, head // 2, : 46 - voters + at].tolist(), 8**-0.5
            )
            for at, query in enumerate(queries)
        ]
        rows = [(row + [0.0] * voters)[:39] for row in rows]
        if window_reduce == "max":
            rows = [row[: 45 - voters] + [vote / 4 for vote in row[45 - voters :]] for row in rows]
        how = "max" if window_reduce == "max" else "sum"
        expected.append(oracle.reduce_group(rows, how))
    if group_reduce != "none":
        expected = [oracle.reduce_group(expected[at : at + 2], group_reduce) for at in (0, 2)]
    assert all(oracle.cut_gap(head, 12) > ROUNDING * voters for head in expected)
    kept = [oracle.kept_positions(head, 45, 12) for head in expected]
    assert our_kept(policy.select(layer), layer) == kept
    if window_reduce == "max":
        counted = torch.tensor(expected)[:, : 45 - max(voters, 6)]
        assert torch.all(policy.score(layer)[0] >= counted.mean(-1, True) * 0.998)


@pytest.mark.parametrize("pooling", ["max", "avg"])
def test_pooling_kernel_may_be_wider_than_the_prefix(pooling):
    votes = torch.rand(1, 2, 10)
    wide, pair = 2**40 + 1, (2**39, 2**39)
    expected = reference.pool_votes(votes, pair, pooling)
    assert torch.equal(reference.pool_votes(votes, wide, pooling), expected)
    at_edge = reference.pool_votes(votes, 21, pooling)
    torch.testing.assert_close(at_edge, reference.pool_votes(votes, (10, 10), pooling))


@pairs(window_size=[1, 6], group_size=[1, 3], with_sinks=[False, True], softcap=[None, 3.0])
def test_votes_equal_the_oracle(window_size, group_size, with_sinks, softcap):
    layer = random_layer(
        7,
        query_heads=2 * group_size,
        prompt_tokens=window_size + 19,
        query_tokens=window_size,
        softcap=softcap,
        with_sinks=with_sinks,
    )
    options = layer.score_options
    votes = ops.window_votes(layer)
    for head in range(2 * group_size):
        looped = oracle.head_votes(
            layer.queries[0, head].tolist(),
            layer.keys[0, head // group_size].tolist(),
            options.scaling,
            softcap,
            float(options.sink_logits[head]) if with_sinks else None,
        )
        assert votes[0, head].tolist() == pytest.approx(looped, abs=ROUNDING * window_size)


@pairs(
    kernel_size=[1, 3, 13, (0, 12), (3, 0), (2, 5), (0, 40)],
    pooling=["max", "avg"],
    prefix_tokens=[1, 2, 5, 30],
)
def test_pooled_votes_equal_the_oracle(prefix_tokens, pooling, kernel_size):
    votes = torch.randn(2, 2, prefix_tokens, generator=torch.Generator().manual_seed(0))
    pooled = ops.pool_votes(votes, kernel_size, pooling)
    for ours, own in zip(pooled.flatten(0, 1), votes.flatten(0, 1), strict=True):
        looped = oracle.pool(own.tolist(), kernel_size, pooling)
        assert ours.tolist() == pytest.approx(looped, abs=1e-6)
