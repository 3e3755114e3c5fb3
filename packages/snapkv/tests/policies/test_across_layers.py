"""One budget for all layers: the best scores of all layers are kept, in the exact number."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from snapkv import (
    AcrossLayers,
    AutoBudget,
    CompressedCache,
    CriticalKV,
    InvalidArgumentError,
    KVCodes,
    KVzip,
    PyramidKV,
    SnapKV,
)
from snapkv.cache import layer_group
from snapkv.hf.forward_context import Hook, hooked
from snapkv.ops import TokenCost
from snapkv.policies.across_layers import in_blocks
from tests.families import call, peaked_model, random_ids, tiny_config, tiny_model
from tests.ops.states import layer_with_scores, pad_left, random_layer, rated_layer
from tests.policies.reading import ended

TOKENS = 70
POLICY = AcrossLayers(SnapKV(24, window_size=4))


def kept_of(policy, prompts, layers=None):
    """Return the kept positions for every row, layer and head."""
    layers = ended(policy, prompts) if layers is None else layers
    pads = prompts[0].pad_tokens
    firsts = [0] * len(prompts[0].keys) if pads is None else pads.tolist()
    return [
        [
            [set(head[head >= first].tolist()) for head in one.stored_columns()[row]]
            for one in layers
        ]
        for row, first in enumerate(firsts)
    ]


def best_of_all(policy, layers, row):
    """Return the positions to keep in `row`, from one sorted list of its scores."""
    scorer, window, found, total = policy.policy, policy.policy.window_size, [], 0
    pads = [0 if each.pad_tokens is None else int(each.pad_tokens[row]) for each in layers]
    heads = [(at, head) for at, each in enumerate(layers) for head in range(each.keys.shape[1])]
    T = layers[0].keys.shape[2]
    prefix = range(pads[0], max(T - window, pads[0]))
    prefixes = [scorer.prefix(each, per_head_budget=True) for each in layers]
    means = [scorer.counts(each)[row] for each in prefixes]
    for at, head in heads:
        total += means[at]
        for position in prefix:
            score = float(scorer.score(layers[at])[row, head, position])
            if position - pads[0] < scorer.sink_tokens:
                score = float("inf")
            protected = layers[at].protected
            if protected is not None and protected[row, 0, position]:
                score = float("inf")
            found.append((-score, at, head, position))
    found.sort()
    if min(means) <= scorer.sink_tokens:  # every head of a layer keeps as many
        of_heads = {where: [entry for entry in found if entry[1:3] == where] for where in heads}
        found = [entry for (at, _), own in of_heads.items() for entry in own[: means[at]]]
    else:
        found = found[:total]
    kept = [entry[1:] for entry in found]
    last = set(range(max(T - window, pads[0]), T))
    return [
        [
            {place for *where, place in kept if where == [at, head]} | last
            for head in range(each.keys.shape[1])
        ]
        for at, each in enumerate(layers)
    ]


def test_layers_share_one_budget_as_in_a_worked_example():
    """Beside the window, 4 heads keep 2 positions on average: 4 sinks and the best 4."""
    layers = [
        rated_layer([[0.0, 0.9, 0.8, 0.7, 9.0], [0.0, 0.1, 0.05, 0.0, 9.0]], num_layers=2),
        rated_layer(
            [[0.0, 0.6, 0.2, 0.2, 9.0], [0.0, 0.05, 0.3, 0.01, 9.0]], depth=1, num_layers=2
        ),
    ]
    policy = AcrossLayers(KVzip(3, window_size=1, sink_tokens=1))
    assert kept_of(policy, layers) == [[[{0, 1, 2, 3, 4}, {0, 4}], [{0, 1, 4}, {0, 4}]]]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=2),
    heads=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    limit=st.one_of(st.integers(1, 20), st.sampled_from([0.02, 0.1, 0.5, 1.0]), st.just("50%")),
    window=st.integers(1, 4),
    sinks=st.integers(0, 3),
    protects=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_best_scores_of_all_layers_are_kept(lengths, heads, limit, window, sinks, protects, seed):
    """Cases have ties, padding, protected positions, different heads, and every kind of budget."""
    sizes = {"window_size": window, "sink_tokens": sinks}
    if isinstance(limit, float):
        policy = AcrossLayers(KVzip(keep_ratio=limit, **sizes))
    else:
        more = limit if isinstance(limit, str) else window + sinks + limit
        policy = AcrossLayers(KVzip(more, **sizes))
    layers = []
    for depth, count in enumerate(sorted(heads, reverse=True)):
        numbers = [seed + 7 * depth + 31 * row for row in range(len(lengths))]
        rows = [
            random_layer(own, kv_heads=count, query_heads=count, prompt_tokens=n, query_tokens=0)
            for own, n in zip(numbers, lengths, strict=True)
        ]
        layer = pad_left(rows, query_tokens=0)
        cost = TokenCost(full_bytes=4 * count, block_bytes=4 * count)
        layer = replace(layer, received=(layer.received * 4).round(), depth=depth)
        layers.append(replace(layer, num_layers=len(heads), token_cost=lambda c=cost: c))
    if protects:
        stays = torch.zeros(len(lengths), 1, max(lengths), dtype=torch.bool)
        stays[:, :, max(lengths) // 2] = not min(lengths) < max(lengths)
        layers = [replace(layer, protected=stays) for layer in layers]
    try:
        kept = kept_of(policy, layers)
    except InvalidArgumentError:  # no room for what must stay
        assume(False)
    assert kept == [best_of_all(policy, layers, row) for row in range(len(lengths))]


def test_scores_of_blocks_of_codes_equal_a_worked_example():
    """Blocks have two tokens; the window shares one with 0.9, and 0.05 would fill half of one."""
    i = math.inf
    ranked = torch.tensor([[0.9, 0.1, 0.5, 0.3, 0.2, 0.05, i], [0.1, 0.4, 0.6, 0.2, -i, 0.3, i]])
    expected = [[i, 0.15, 0.4, 0.4, 0.15, -i, i], [0.15, 0.35, i, 0.15, -i, 0.35, i]]
    torch.testing.assert_close(in_blocks(ranked, 2), torch.tensor(expected))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(120, 250), min_size=1, max_size=2),
    heads=st.integers(1, 3),
    depth=st.integers(1, 4),
    share=st.integers(9, 20),
    seed=st.integers(0, 1000),
)
def test_byte_budget_keeps_the_best_whole_blocks_of_codes(lengths, heads, depth, share, seed):
    """No evicted block is better than a kept one, and the bytes are spent."""
    policy = AcrossLayers(KVzip(f"{share}%", window_size=2, sink_tokens=1))
    prompts, full_bytes = [], 0
    sizes = {"kv_heads": heads, "query_heads": heads, "query_tokens": 0, "head_dim": 32}
    for at in range(depth):
        rows = [
            random_layer(seed + 9 * at + row, prompt_tokens=tokens, **sizes)
            for row, tokens in enumerate(lengths)
        ]
        prompt = pad_left(rows, query_tokens=0)
        finite = {name: getattr(prompt, name).nan_to_num() for name in ("keys", "values")}
        prompts.append(replace(prompt, **finite))
        full_bytes += sum(lengths) * heads * 2 * 32 * 4
    layers = ended(policy, prompts, KVCodes(8, 4))
    for row, kept in enumerate(kept_of(policy, prompts, layers)):
        first, best_left, worst_kept = max(lengths) - lengths[row], -math.inf, math.inf
        for prompt, of_layer in zip(prompts, kept, strict=True):
            scores = prompt.received[row].clone()
            scores[:, first : first + 1] = scores[:, -2:] = math.inf
            for ranked, places in zip(scores[:, first:], of_layer, strict=True):
                order = ranked.argsort(descending=True, stable=True)
                blocks = ranked[order].split(32)
                whole, part = divmod(len(places), 32)
                assert not part
                assert places == {int(place) + first for place in order[: len(places)]}
                worst_kept = min([worst_kept, *(float(each.mean()) for each in blocks[:whole])])
                left = (float(each.mean()) for each in blocks[whole:] if len(each) == 32)
                best_left = max([best_left, *left])
        assert best_left <= worst_kept
    spent, given = sum(layer.held_bytes for layer in layers), share * full_bytes // 100
    assert spent <= given
    all_whole = sum(own // 32 * 1792 for own in lengths) * heads * depth
    assert min(given, all_whole) - spent < 1792 * heads * len(lengths), "a block of every head"


def test_auto_budget_of_a_layer_does_not_depend_on_other_layers():
    """Every head keeps the positions with large votes, whatever other heads and layers keep."""
    layer = layer_with_scores([[0.3, 0.1, 0.02, 0.2], [0.01, 0.02, 0.5, 0.01]])
    scorer = SnapKV(AutoBudget(lost_vote=0.05, least=1), window_size=1, kernel_size=1)
    kept = AcrossLayers(scorer).select(layer)
    assert kept.keep_indices[0].tolist() == [[0, 1, 3, 4], [-1, -1, 2, 4]]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(6, 40), min_size=1, max_size=3),
    depth=st.integers(1, 3),
    kv_heads=st.sampled_from([1, 2, 4]),
    window_reduce=st.sampled_from(["max", "mean"]),
    lost=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_row_with_an_auto_budget_keeps_the_same_positions_as_alone(
    lengths, depth, kv_heads, window_reduce, lost, seed
):
    """The bound loses so few votes that some rows, heads and layers keep everything.

    The mean of a row's heads rounds up to all of the row there, and some of its heads drop a token.
    """
    rows = [
        [
            random_layer(seed + 31 * row + at, kv_heads=kv_heads, prompt_tokens=n, query_tokens=4)
            for at in range(depth)
        ]
        for row, n in enumerate(lengths)
    ]
    options = {"window_size": 4, "pooling": "fading", "window_reduce": window_reduce}
    voting = SnapKV("auto", **options, sink_tokens=1)
    rated = [
        voting.compute_shares(voting.prefix(layer)).flatten() for layers in rows for layer in layers
    ]
    votes = torch.cat(rated)
    votes = votes[votes.isfinite()].unique()  # ascending
    assume(len(votes) > lost)
    bound = float(votes[lost - 1 : lost + 1].double().mean())  # no vote is within rounding of it
    assume(0 < bound < 1)
    policy = AcrossLayers(SnapKV(AutoBudget(lost_vote=bound, least=1), **options, sink_tokens=1))
    alone = [kept_of(policy, layers)[0] for layers in rows]
    batch = [pad_left([*layers], query_tokens=4) for layers in zip(*rows, strict=True)]
    pads = [max(lengths) - own for own in lengths]
    for most_bytes in (0, 2 * batch[0].keys.nbytes + 1, 1 << 30):  # a layer, two, or all at once
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer_group, "MOST_BYTES", {"cpu": most_bytes})
            found = kept_of(policy, batch)
        for row, before, expected in zip(found, pads, alone, strict=True):
            assert [[{at - before for at in head} for head in one] for one in row] == expected


def test_prefill_holds_at_most_twice_the_budget_and_one_layer(monkeypatch):
    """The tensors of all layers are counted at every attention call of the prefill.

    A limit of 0 bytes keeps layers from waiting for each other.
    """
    monkeypatch.setattr(layer_group, "MOST_BYTES", {"cpu": 0})
    config = tiny_config("llama")
    config.num_hidden_layers = 12
    model, ids = peaked_model(config, "sdpa"), random_ids(1, 256)
    cache = CompressedCache(model, AcrossLayers(SnapKV(24, window_size=4)))
    held = []

    class Watch(Hook):
        def on_attention(self, call, attended):
            held.append(sum(layer.held_bytes for layer in cache.prompt_state.layers))

    with hooked(Watch()):
        call(model, cache, ids)
    layer_bytes = 2 * 2 * 256 * model.config.head_dim * 4
    assert max(held) <= 2 * held[-1] + layer_bytes
    assert held[-1] == 12 * layer_bytes * 24 // 256


def test_methods_with_incomparable_scores_and_single_layers_are_refused():
    for policy in (PyramidKV(40), CriticalKV(KVzip(40))):
        with pytest.raises(
            InvalidArgumentError, match=r"policy: the scores of .* cannot be compared"
        ):
            AcrossLayers(policy)
    with pytest.raises(
        InvalidArgumentError, match="policy: the method across-layers compares all layers"
    ):
        POLICY.select(random_layer(0, prompt_tokens=TOKENS, query_tokens=4))


def test_layers_with_sliding_windows_have_no_part_in_the_budget():
    model = tiny_model("gemma3_text")
    cache = CompressedCache(model, POLICY)
    call(model, cache, random_ids(1, TOKENS))
    assert 0 < len(cache.compressed_layers) < len(cache.layers)
    assert cache.report().kept_tokens == 24


@pytest.mark.parametrize("group_reduce", ["max", "none"])
def test_layers_share_a_budget_by_the_largest_votes(group_reduce):
    reduced = {"window_reduce": "max", "group_reduce": group_reduce}
    policy = AcrossLayers(SnapKV(16, window_size=4, pooling="fading", voters=6, **reduced))
    rows = [
        [
            random_layer(seed + row, prompt_tokens=tokens, query_tokens=6)
            for row, tokens in enumerate((30, 22))
        ]
        for seed in (0, 5)
    ]
    layers = [pad_left(own, query_tokens=6) for own in rows]
    if group_reduce == "max":
        expected = [best_of_all(policy, layers, row) for row in (0, 1)]
        assert kept_of(policy, layers) == [
            [[{at for at in head if at >= first} for head in layer] for layer in row]
            for row, first in zip(expected, (0, 8), strict=True)
        ]
    kept = [sum(len(head) for layer in row for head in layer) for row in kept_of(policy, layers)]
    assert kept == [16 * len(layers) * (4 if group_reduce == "none" else 2)] * 2
