"""Spans that are dropped, protected or compressed; `tests/sequences` does it at random."""

import copy

import pytest
import torch

from snapkv import (
    H2O,
    AdaKV,
    CacheMismatchError,
    CompressedCache,
    DraftVotes,
    ExpectedAttention,
    FullCache,
    InvalidArgumentError,
    KeyDiff,
    KVCodes,
    OutOfMemoryError,
    SnapKV,
    SnapKVError,
)
from snapkv.policies.spans import Spans
from tests.families import random_ids, tiny_model
from tests.oracle import masked_decode_logits

SNAPKV = SnapKV(40, window_size=8)
FEW_BITS = KVCodes(8, 8, recent_tokens=4, sink_tokens=3)
WAYS = {
    "dense": (SNAPKV, {}),
    "ragged": (AdaKV(SNAPKV), {}),
    "whole": (FullCache(), {}),
    "recall": (SNAPKV, {"recall": "host"}),
    "ragged recall": (AdaKV(SNAPKV), {"recall": "host"}),
    "codes": (SNAPKV, {"quantize": FEW_BITS}),
    "ragged codes": (AdaKV(SNAPKV), {"quantize": FEW_BITS}),
    "whole codes": (FullCache(), {"quantize": FEW_BITS}),
}
SPANS = [(3, 20), (60, 70)]


def read(policy, ids, **options):
    model = tiny_model("llama")
    cache = CompressedCache(model, policy, **options)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return model, cache


@torch.no_grad()
def decoded(model, cache, tokens):
    return torch.cat(
        [model(token, past_key_values=cache).logits for token in tokens.split(1, dim=1)], dim=1
    )


def stored(cache):
    """For each layer, row and head the positions, keys and values that it holds, in order."""
    found = []
    for layer in cache.reading.layers:
        keys, values = layer.store.padded()
        for row, heads in enumerate(layer.stored_positions()):
            for head, positions in enumerate(heads):
                own = positions >= 0
                held = keys[row, head, -len(own) :][own], values[row, head, -len(own) :][own]
                found.append({int(p): pair for p, *pair in zip(positions[own], *held, strict=True)})
    return found


def test_positions_by_hand():
    _, cache = read(FullCache(), random_ids(1, 8))
    cache.drop([(1, 3), (6, 7)])
    assert cache.kept_positions(0)[0, 0].tolist() == [0, 3, 4, 5, 7]
    cache.drop([(2, 5)])
    assert cache.kept_positions(0)[0, 0].tolist() == [0, 5, 7]
    cache.crop(-2)
    assert cache.kept_positions(0)[0, 0].tolist() == [0, 5]
    assert cache.get_seq_length() == 6
    assert cache.report()["dropped_tokens"] == 4


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("steps", [0, 6])
def test_what_is_left_stays_bit_for_bit_and_attention_is_the_masked_oracles(way, rows, steps):
    policy, options = WAYS[way]
    ids, tokens = random_ids(rows, 90), random_ids(rows, 12, 3)
    model, cache = read(policy, ids, **options)
    if steps:
        decoded(model, cache, tokens[:, :steps])
    before, freed = stored(cache), cache.report()
    spans = SPANS if rows == 1 else [SPANS, [(10, 15)]]
    cache.drop(spans)
    dropped = [Spans.of("spans", SPANS), Spans.of("spans", [(10, 15)])]
    heads = len(before) // len(cache.compressed_layers) // rows
    coded = options.get("quantize") is not None
    for number, (had, has) in enumerate(zip(before, stored(cache), strict=True)):
        gone = dropped[number // heads % rows]
        expected = [place for place in had if not bool(gone.cover(torch.tensor(place)))]
        assert list(has) == expected
        recoded = list(had)[:3] if coded else []  # first tokens that other heads have lost
        recoded += list(had)[-20:] if coded and rows > 1 else []  # a tail that other rows have lost
        for place in expected:
            for one, other in zip(had[place], has[place], strict=True):
                assert float((one - other).abs().max()) <= (0.02 if place in recoded else 0.0)
    if not coded:
        assert cache.report().held_bytes < freed.held_bytes
    assert cache.report().host_bytes <= freed.host_bytes + cache.report().full_bytes
    assert cache.get_seq_length() == 90 + steps
    if coded or steps:  # whose tokens the oracle would read over all of the prompt
        return
    expected = masked_decode_logits(model, cache, ids, tokens)
    assert torch.allclose(decoded(model, cache, tokens), expected, atol=1e-5)


def test_a_dropped_span_leaves_the_pool_and_the_next_turn_chooses_as_without_it():
    ids, turn = random_ids(1, 90), random_ids(1, 20, 5)
    model, cache = read(SNAPKV, ids, recall="host")
    before = cache.report().host_bytes
    cache.drop(SPANS)
    assert cache.report().host_bytes == before * (90 - 27) // 90
    cache.expect_prompt(110)
    with torch.no_grad():
        model(turn, past_key_values=cache)
    gone = Spans.of("spans", SPANS)
    for index in cache.compressed_layers:
        kept = cache.kept_positions(index)
        assert kept.shape[-1] == 40
        assert not bool(gone.cover(kept).any())


def test_queries_of_dropped_tokens_do_not_vote():
    _, cache = read(SNAPKV, random_ids(1, 90), recall="host")
    before = cache.reading.layers[0].notes.last_queries
    cache.drop([(20, 30), (84, 87)])
    after = cache.reading.layers[0].notes.last_queries
    assert torch.equal(after, before[:, :, [0, 1, 5, 6, 7]])


def test_under_a_limit_a_drop_needs_no_more_room():
    ids = random_ids(1, 90)
    _, free = read(SNAPKV, ids, recall="host")
    limit = free.report().host_bytes
    model, cache = read(SNAPKV, ids, recall="host", recall_bytes=limit)
    shared = copy.copy(cache)
    with torch.no_grad():
        model(random_ids(1, 3, 5), past_key_values=cache)
    held = stored(cache)
    with pytest.raises(OutOfMemoryError, match=r"^recall_bytes: expected room for .*; "):
        cache.compress([(0, 60)], 5)
    assert [list(one) for one in stored(cache)] == [list(one) for one in held]
    cache.drop(SPANS)
    assert shared.report().host_bytes == limit > cache.report().host_bytes
    del shared
    pool = cache.reading.layers[0].offloaded.pool
    assert pool.taken_bytes == cache.report().host_bytes


@pytest.mark.parametrize("budget", [5, "10%"])
@pytest.mark.parametrize("policy", [SNAPKV, KeyDiff(40, window_size=8), AdaKV(SNAPKV)])
def test_compress_keeps_the_best_of_the_spans_and_all_outside(policy, budget):
    _, cache = read(policy, random_ids(1, 90), recall="host")
    spans = Spans.of("spans", [(0, 70)])
    before = [set(held) for held in stored(cache)]
    most = 5 if budget == 5 else 7
    cache.compress([(0, 70)], budget)
    cut = 0
    for had, has in zip(before, map(set, stored(cache)), strict=True):
        inside = {place for place in had if bool(spans.cover(torch.tensor(place)))}
        assert len(has & inside) == min(len(inside), most)
        assert has - inside == had - inside
        cut += len(had - has)
    assert cut
    again = [list(held) for held in stored(cache)]
    cache.compress([(0, 70)], budget)
    assert [list(held) for held in stored(cache)] == again


def test_compress_keeps_what_a_plain_top_k_of_the_votes_does():
    _, cache = read(SnapKV(40, window_size=8, kernel_size=1), random_ids(1, 90), recall="host")
    expected = []
    for layer in cache.reading.layers:
        queries, keys = layer.notes.last_queries[0], layer.store.keys[0]
        queries = queries.unflatten(0, (len(keys), -1))
        scores = torch.einsum("hgnd,hsd->hgns", queries, keys) * keys.shape[-1] ** -0.5
        scores = scores + torch.full(scores.shape[-2:], float("-inf")).triu(scores.shape[-1] - 7)
        votes = scores.softmax(-1).mean(1).sum(1)
        for head, positions in zip(votes, layer.stored_positions()[0].tolist(), strict=True):
            inside = [place for place, position in enumerate(positions[:-8]) if position < 70]
            best = sorted(inside, key=lambda place: -float(head[place]))[:12]
            outside = range(len(inside), len(positions))
            expected.append([positions[place] for place in sorted([*best, *outside])])
    cache.compress([(0, 70)], 12)
    assert [list(held) for held in stored(cache)] == expected


def test_protected_spans_stay_through_later_turns():
    ids, turn = random_ids(1, 60), random_ids(1, 60, 5)
    model, cache = read(SNAPKV, ids, recall="host")
    cache.protect([(11, 19), (80, 84)])
    assert cache.options["protect"] == [[11, 19], [80, 84]]
    cache.expect_prompt(120)
    with torch.no_grad():
        model(turn, past_key_values=cache)
    for index in cache.compressed_layers:
        for head in cache.kept_positions(index)[0].tolist():
            assert {*range(11, 19), *range(80, 84)} <= set(head)
    with pytest.raises(InvalidArgumentError, match=r"expected none that is protected, got \(80, 8"):
        cache.drop([(70, 82)])
    cache.reset()
    assert cache.options["protect"] is None


def test_what_is_gone_is_not_protected():
    _, cache = read(SNAPKV, random_ids(1, 90))
    with pytest.raises(InvalidArgumentError, match=r"layer 0 has evicted \d+; protect them"):
        cache.protect([(0, 30)])
    cache.protect([(84, 90)])
    _, cache = read(SNAPKV, random_ids(1, 90), recall="host")
    cache.drop([(5, 9)])
    with pytest.raises(InvalidArgumentError, match=r"expected none that was dropped .* \(5, 7\)"):
        cache.protect([(0, 7)])


@pytest.mark.parametrize("policy", [SNAPKV, AdaKV(SNAPKV)])
def test_more_than_a_turn_has_room_for_is_not_protected(policy):
    """It was, and every later turn was refused."""
    _, cache = read(policy, random_ids(1, 60), recall="host")
    cache.protect([(0, 20)])
    with pytest.raises(InvalidArgumentError, match=r"expected at most 32 tokens.* got 33; raise"):
        cache.protect([(20, 33)])
    assert cache.options["protect"] == [[0, 20]]
    cache.protect([(20, 32), (55, 70)])  # of which the window of the next turn keeps the others


def test_nothing_is_protected_between_a_prompt_and_its_draft():
    """It was ignored by the choice that the draft's votes make."""
    _, cache = read(DraftVotes(SNAPKV, draft_tokens=1), random_ids(1, 90))
    with pytest.raises(CacheMismatchError, match="expected a draft of 1 tokens"):
        cache.protect([(84, 90)])


WRONG = [
    [(5, 3)],
    [(-1, 3)],
    [(80, 91)],
    [(4, 4)],
    [(0, 90)],
    [[(0, 3)], [(0, 3)]],
    [(1, 2, 3)],
    "0-3",
    [(0.5, 3)],
    None,
]


@pytest.mark.parametrize("spans", WRONG)
@pytest.mark.parametrize("action", ["drop", "compress"])
def test_a_wrong_span_changes_nothing(spans, action):
    if (spans, action) == ([(0, 90)], "compress"):
        return
    _, cache = read(SNAPKV, random_ids(1, 90), recall="host")
    before, report = stored(cache), cache.report()
    with pytest.raises(SnapKVError, match=r"^spans: expected .*; "):
        cache.drop(spans) if action == "drop" else cache.compress(spans, 5)
    assert cache.report() == report
    assert [list(held) for held in stored(cache)] == [list(held) for held in before]


REFUSED = [
    ("policy: expected one that only compresses prompts", H2O(40), {}),
    ("policy: expected one that does not ask where", ExpectedAttention(40, window_size=8), {}),
    ("storage: expected 'dynamic'", SNAPKV, {"storage": "static"}),
    ("turns: expected spans of which every head", SNAPKV, {"turns": "compress"}),
]


@pytest.mark.parametrize(("said", "policy", "options"), REFUSED)
def test_what_cannot_follow_is_refused_before_anything_changes(said, policy, options):
    _, cache = read(policy, random_ids(1, 90), **options)
    report = cache.report()
    with pytest.raises(InvalidArgumentError, match=f"^{said}.* got .*; "):
        cache.drop([(3, 60)])
    assert cache.report() == report


def test_compress_says_what_it_lacks():
    _, cache = read(SNAPKV, random_ids(1, 90))
    with pytest.raises(InvalidArgumentError, match="expected the last queries for compress"):
        cache.compress([(3, 60)], 5)
    _, cache = read(FullCache(), random_ids(1, 90))
    with pytest.raises(InvalidArgumentError, match="that scores the tokens of a KV head"):
        cache.compress([(3, 60)], 5)
    _, cache = read(KeyDiff(40, window_size=8), random_ids(1, 90))
    for budget in (0, "64MiB", 2.5):
        with pytest.raises(SnapKVError, match=r"^budget: "):
            cache.compress([(3, 60)], budget)


def test_a_text_that_is_coming_in_has_no_spans_yet():
    model = tiny_model("llama")
    cache = CompressedCache(model, SNAPKV)
    with pytest.raises(InvalidArgumentError, match="expected a prompt that was read to its end"):
        cache.drop([(0, 3)])
    cache.protect([(0, 3)])
    cache.expect_prompt(90)
    with torch.no_grad():
        model(random_ids(1, 50), past_key_values=cache)
        with pytest.raises(InvalidArgumentError, match="expected a prompt that was read to its"):
            cache.drop([(0, 3)])
        model(random_ids(1, 40), past_key_values=cache)
    cache.drop([(3, 9)])
