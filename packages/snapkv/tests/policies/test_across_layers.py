"""One budget for all layers: the best scores of all of them are kept, and their number is exact."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from snapkv import (
    AcrossLayers,
    CompressedCache,
    CriticalKV,
    InvalidArgumentError,
    KeyDiff,
    KVCodes,
    KVzap,
    KVzip,
    SnapKV,
    UnsupportedModelError,
)
from snapkv.app.observing import record_prompt_twice
from snapkv.kvzip import read_context, read_twice
from snapkv.ops import TokenCost
from snapkv.policies import Selection
from tests.families import call, random_ids, tiny_model
from tests.gates import drawn_gate
from tests.ops.states import pad_left, random_layer
from tests.oracle import masked_decode_logits

TOKENS, BUDGET = 70, {"budget": 24, "window_size": 4}
METHODS = {
    "kvzip": AcrossLayers(KVzip(**BUDGET, chunk_tokens=32)),
    "kvzip plus": AcrossLayers(KVzip(**BUDGET, plus=True)),
    "kvzap": AcrossLayers(KVzap(**BUDGET, gate=drawn_gate())),
}
methods = pytest.mark.parametrize("policy", METHODS.values(), ids=METHODS)


def kept_of(policy, layers):
    """For every row, layer and head the positions that are kept."""
    shared = policy.allocate(iter(layers))
    chosen = [policy.select(layer) or Selection.whole(layer) for layer in shared]
    pads = layers[0].pad_tokens
    firsts = [0] * len(layers[0].keys) if pads is None else pads.tolist()
    return [
        [[set(head[head >= first].tolist()) for head in one.keep_indices[row]] for one in chosen]
        for row, first in enumerate(firsts)
    ]


def best_of_all(policy, layers, row):
    """The same, out of one list of all scores of a row, plainly."""
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
    if min(means) <= scorer.sink_tokens:  # no more than the first of the sinks
        kept = [(at, head, place) for at, head in heads for place in prefix[: means[at]]]
    else:
        kept = [entry[1:] for entry in sorted(found)[:total]]
    last = set(range(max(T - window, pads[0]), T))
    return [
        [
            {place for *where, place in kept if where == [at, head]} | last
            for head in range(each.keys.shape[1])
        ]
        for at, each in enumerate(layers)
    ]


def layer_of(scores, **parts):
    """A layer that received so much in the second reading, (H, T)."""
    received = torch.tensor(scores)[None]
    states = torch.zeros(1, *received.shape[1:], 2)
    layer = random_layer(0, prompt_tokens=received.shape[2], query_tokens=0)
    return replace(layer, keys=states, values=states, received=received, **parts)


def test_by_hand():
    """A window of 1 and a sink each; 2 more on average, 8 of 4 heads: 4 sinks and the best 4."""
    layers = [
        layer_of([[0.0, 0.9, 0.8, 0.7, 9.0], [0.0, 0.1, 0.05, 0.0, 9.0]]),
        layer_of([[0.0, 0.6, 0.2, 0.2, 9.0], [0.0, 0.05, 0.3, 0.01, 9.0]]),
    ]
    policy = AcrossLayers(KVzip(3, window_size=1, sink_tokens=1))
    assert kept_of(policy, layers) == [[[{0, 1, 2, 3, 4}, {0, 4}], [{0, 1, 4}, {0, 4}]]]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=2),
    heads=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    limit=st.one_of(st.integers(1, 20), st.sampled_from([0.02, 0.1, 0.5, 1.0]), st.just("50%")),
    window=st.integers(1, 4),
    sinks=st.integers(0, 3),
    protects=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_what_is_kept_is_the_best_of_all(lengths, heads, limit, window, sinks, protects, seed):
    """Many ties; layers of different heads; pads; what must stay; tokens, a ratio, bytes."""
    sizes = {"window_size": window, "sink_tokens": sinks}
    if isinstance(limit, float):
        policy = AcrossLayers(KVzip(keep_ratio=limit, **sizes))
    else:
        more = limit if isinstance(limit, str) else window + sinks + limit
        policy = AcrossLayers(KVzip(more, **sizes))
    layers = []
    for depth, count in enumerate(heads):
        numbers = [seed + 7 * depth + 31 * row for row in range(len(lengths))]
        rows = [
            random_layer(own, kv_heads=count, query_heads=count, prompt_tokens=n, query_tokens=0)
            for own, n in zip(numbers, lengths, strict=True)
        ]
        layer = pad_left(rows, query_tokens=0)
        cost = TokenCost(full_bytes=4 * count, token_bytes=4 * count, block_bytes=4 * count)
        layer = replace(layer, received=(layer.received * 4).round(), depth=depth)
        layers.append(replace(layer, num_layers=len(heads), token_cost=lambda _, c=cost: c))
    if protects:
        stays = torch.zeros(len(lengths), 1, max(lengths), dtype=torch.bool)
        stays[:, :, max(lengths) // 2] = not min(lengths) < max(lengths)
        layers = [replace(layer, protected=stays) for layer in layers]
    try:
        kept = kept_of(policy, layers)
    except InvalidArgumentError:  # no room for what must stay
        assume(False)
    for row in range(len(lengths)):
        assert kept[row] == best_of_all(policy, layers, row)


def numbers(cache):
    return [(cache.kept_positions(i) >= 0).sum(-1).tolist() for i in range(len(cache.layers))]


@methods
@pytest.mark.parametrize("options", [{}, {"quantize": KVCodes(8, 8, recent_tokens=3)}], ids=str)
def test_a_model_goes_on_with_what_is_kept(policy, options, tmp_path):
    """As many tokens as the budget says in all, in rows as alone, as recorded, and from a file."""
    model, ids, later = tiny_model("llama"), random_ids(2, TOKENS), random_ids(2, 3, 1)
    cache = CompressedCache(model, policy, **options)
    read_twice(model, ids, cache, instruction_ids=(5, 6))
    recorded = record_prompt_twice(model, ids, policy, instruction_ids=(5, 6))
    again = recorded.compressed(policy, **options)
    counts = numbers(cache)
    assert numbers(again) == counts
    assert len({sum(layer[0]) for layer in counts}) > 1, "layers keep different numbers"
    for row in range(2):
        assert sum(sum(layer[row]) for layer in counts) == 24 * 2 * 4
        alone = read_context(model, ids[row : row + 1], policy, instruction_ids=(5, 6))
        assert [layer[row] for layer in counts] == [layer[0] for layer in numbers(alone)]
    cache.save(tmp_path / "file")
    loaded = CompressedCache.load(tmp_path / "file", model, policy=policy)
    expected = masked_decode_logits(model, cache, ids, later)
    for each in (cache, loaded, again):
        got = call(model, each, later)
        atol = 0.05 if options else 1e-4
        torch.testing.assert_close(got, expected, atol=atol, rtol=1e-3)
    assert cache.report().kept_tokens == 24 + 3


def test_what_cannot_be_is_refused_by_name():
    model, ids = tiny_model("llama"), random_ids(1, TOKENS)
    for policy in (KeyDiff(40), CriticalKV(KVzip(40))):
        with pytest.raises(InvalidArgumentError, match=r"policy: .* the same in every layer, got"):
            AcrossLayers(policy)
    policy = METHODS["kvzap"]
    cache = CompressedCache(model, policy)
    with pytest.raises(InvalidArgumentError, match="policy: expected one that chooses when a lay"):
        call(model, cache, ids)
    read_twice(model, ids, cache)  # nothing was changed by it
    with pytest.raises(InvalidArgumentError, match="policy: expected layers that know their sha"):
        policy.select(random_layer(0, prompt_tokens=TOKENS, query_tokens=0))
    with pytest.raises(UnsupportedModelError, match="layer where all layers share a budget"):
        read_context(tiny_model("gemma3_text"), ids, policy)


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
