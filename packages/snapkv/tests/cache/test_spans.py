"""Dropping spans of tokens, by worked examples; `tests/sequences` drops random spans."""

import copy

import pytest
import torch

from snapkv import (
    AcrossLayers,
    AdaKV,
    CompressedCache,
    FullCache,
    InvalidArgumentError,
    SnapKV,
    SnapKVError,
)
from snapkv.policies.spans import Spans
from tests import families
from tests.families import CLOSE, call, random_ids, tiny_model
from tests.oracle import masked_decode_logits
from tests.pairs import pairs

SNAPKV = SnapKV(40, window_size=8)
WAYS = {
    "dense": (SNAPKV, {}),
    "ragged": (AdaKV(SNAPKV), {}),
    "whole": (FullCache(), {}),
    "recall": (SNAPKV, {"recall": "host"}),
    "ragged recall": (AdaKV(SNAPKV), {"recall": "host"}),
    "codes": (SNAPKV, {"quantize": "int8"}),
    "ragged codes": (AdaKV(SNAPKV), {"quantize": "int8"}),
    "whole codes": (FullCache(), {"quantize": "int8"}),
}
SPANS = [(3, 20), (60, 70)]


def read(policy, ids, **options):
    cache = families.read(tiny_model("llama"), policy, ids, **options)
    return cache.model, cache


def decoded(model, cache, tokens):
    return torch.cat([call(model, cache, token) for token in tokens.split(1, dim=1)], dim=1)


def stored(cache):
    """Return a dict from position to key and value for each layer, row and head."""
    found = []
    for layer in cache.prompt_state.layers:
        keys, values = layer.store.padded()
        for row, heads in enumerate(layer.stored_positions()):
            for head, positions in enumerate(heads):
                own = positions >= 0
                held = keys[row, head, -len(own) :][own], values[row, head, -len(own) :][own]
                found.append({int(p): pair for p, *pair in zip(positions[own], *held, strict=True)})
    return found


def test_drop_and_crop_leave_the_positions_of_a_worked_example():
    _, cache = read(FullCache(), random_ids(1, 8))
    cache.drop([(1, 3), (6, 7)])
    assert cache.kept_positions(0)[0, 0].tolist() == [0, 3, 4, 5, 7]
    cache.drop([(2, 5)])
    assert cache.kept_positions(0)[0, 0].tolist() == [0, 5, 7]
    cache.crop(-2)
    assert cache.kept_positions(0)[0, 0].tolist() == [0, 5]
    assert cache.get_seq_length() == 6
    assert cache.report()["dropped_tokens"] == 4


@pairs(way=list(WAYS), rows=[1, 2], steps=[0, 6])
def test_drop_leaves_other_tokens_unchanged_and_decode_equals_the_masked_oracle(way, rows, steps):
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
        for place in expected:
            for one, other in zip(had[place], has[place], strict=True):
                assert float((one - other).abs().max()) <= (0.02 if coded else 0.0)
    if not coded:
        assert cache.report().held_bytes < freed.held_bytes
    assert cache.report().host_bytes <= freed.host_bytes + cache.report().full_bytes
    assert cache.get_seq_length() == 90 + steps
    if coded or steps:  # whose tokens the oracle would read over all of the prompt
        return
    expected = masked_decode_logits(model, cache, ids, tokens)
    assert torch.allclose(decoded(model, cache, tokens), expected, atol=1e-5)


def test_dropped_tokens_leave_the_offload_pool_and_are_never_selected_again():
    ids, turn = random_ids(1, 90), random_ids(1, 20, 5)
    model, cache = read(SNAPKV, ids, recall="host")
    before = cache.report().host_bytes
    cache.drop(SPANS)
    assert cache.report().host_bytes == before * (90 - 27) // 90
    cache.expect_prompt(110)
    call(model, cache, turn)
    gone = Spans.of("spans", SPANS)
    for index in cache.compressed_layers:
        kept = cache.kept_positions(index)
        assert kept.shape[-1] == 40
        assert not bool(gone.cover(kept).any())


def test_queries_of_dropped_tokens_do_not_vote():
    _, cache = read(SNAPKV, random_ids(1, 90), recall="host")
    before = cache.prompt_state.layers[0].queries.held
    cache.drop([(20, 30), (84, 87)])
    after = cache.prompt_state.layers[0].queries.held
    assert torch.equal(after, before[:, :, [0, 1, 5, 6, 7]])


def test_drop_needs_no_more_host_memory_at_the_recall_limit():
    ids = random_ids(1, 90)
    _, free = read(SNAPKV, ids, recall="host")
    limit = free.report().host_bytes
    model, cache = read(SNAPKV, ids, recall="host", recall_bytes=limit)
    shared = copy.copy(cache)
    call(model, cache, random_ids(1, 3, 5))
    cache.drop(SPANS)
    assert shared.report().host_bytes == limit > cache.report().host_bytes
    del shared
    pool = cache.prompt_state.layers[0].offloaded.pool
    assert pool.taken_bytes == cache.report().host_bytes


RANGES = [(5, 3)], [(-1, 3)], [(80, 91)], [(4, 4)], [(0, 90)]
WRONG = [*RANGES, [[(0, 3)], [(0, 3)]], [(1, 2, 3)], "0-3", [(0.5, 3)], None]


@pytest.mark.parametrize("spans", WRONG)
def test_invalid_spans_are_refused_and_change_nothing(spans):
    _, cache = read(SNAPKV, random_ids(1, 90), recall="host")
    before, report = stored(cache), cache.report()
    with pytest.raises(SnapKVError, match=r"^spans: expected .*\. [A-Z]"):
        cache.drop(spans)
    assert cache.report() == report
    assert [list(held) for held in stored(cache)] == [list(held) for held in before]


REFUSED = [
    (r"spans: the tokens of \(3, 9\) are protected", SNAPKV, {"protect": [(3, 9)]}),
    (
        "turns: the spans cannot be dropped with turns='compress', .* layer 0",
        SNAPKV,
        {"turns": "compress"},
    ),
]


@pytest.mark.parametrize(("said", "policy", "options"), REFUSED)
def test_drop_of_protected_tokens_or_from_compressed_turns_is_refused(said, policy, options):
    _, cache = read(policy, random_ids(1, 90), **options)
    report = cache.report()
    with pytest.raises(InvalidArgumentError, match=rf"^{said}.*\. [A-Z]"):
        cache.drop([(3, 60)])
    assert cache.report() == report


def test_drop_is_refused_before_the_prompt_has_been_read_completely():
    model = tiny_model("llama")
    cache = CompressedCache(model, SNAPKV)
    with pytest.raises(InvalidArgumentError, match="but the cache has only read 0 tokens of it"):
        cache.drop([(0, 3)])
    cache.expect_prompt(90)
    call(model, cache, random_ids(1, 50))
    with pytest.raises(InvalidArgumentError, match="but the cache has only read 50 tokens of it"):
        cache.drop([(0, 3)])
    call(model, cache, random_ids(1, 40))
    cache.drop([(3, 9)])


WHOLE_AGAIN = {
    "one budget for all heads": (SnapKV(16, window_size=4), {}),
    "a budget for each head": (AdaKV(SnapKV(16, window_size=4)), {}),
    "a budget for all layers": (AcrossLayers(SnapKV(16, window_size=4)), {}),
    "a set for each query head": (SnapKV(16, window_size=4, group_reduce="none"), {}),
    "few bits": (SnapKV(16, window_size=4), {"quantize": "int8"}),
    "recall": (SnapKV(16, window_size=4), {"recall": "host"}),
}


@pytest.mark.parametrize("way", WHOLE_AGAIN)
def test_cache_equals_the_full_cache_once_all_evicted_positions_are_dropped(way):
    rows, (policy, options) = 2, WHOLE_AGAIN[way]
    text, turn = random_ids(rows, 60), random_ids(rows, 30, 9)
    model, cache = read(policy, text, **options)
    _, full = read(FullCache(), text, **options)
    assert all(layer.slots.is_compressed for layer in cache.prompt_state.layers)
    for each in (cache, full):
        each.drop([(0, 57)])  # all but tokens of the window, which every head keeps
    assert all(layer.slots.kept is None for layer in cache.prompt_state.layers)
    emptied = copy.copy(cache)
    emptied.crop(-3)
    assert emptied.get_seq_length() == 57
    close = {"atol": 0.02, "rtol": 0.0} if "quantize" in options else CLOSE
    torch.testing.assert_close(call(model, cache, turn), call(model, full, turn), **close)
    emptied.expect_prompt(87)
    call(model, emptied, turn)
    kept = [emptied.kept_positions(layer) for layer in emptied.compressed_layers]
    assert sum(int((each >= 0).sum()) for each in kept) == 16 * rows * len(kept) * kept[0].shape[1]
