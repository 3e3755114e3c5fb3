"""Protected spans stay, in every layer and head, whatever method, storage, padding and turn."""

import copy
from dataclasses import dataclass

import pytest
import torch

import snapkv.policies as methods
from snapkv import CompressedCache
from snapkv.errors import InvalidArgumentError
from snapkv.kvzip import read_twice
from snapkv.policies import (
    H2O,
    RKV,
    TOVA,
    AdaKV,
    AutoBudget,
    Compactor,
    CriticalKV,
    DuoAttention,
    ExpectedAttention,
    FastGen,
    FullCache,
    KeyDiff,
    KVzip,
    LagKV,
    PromptThenDecode,
    PyramidKV,
    Random,
    Scissorhands,
    ScoreThreshold,
    SnapKV,
    StreamingLLM,
)
from snapkv.prefill import chunked, layer_by_layer
from tests.families import random_ids, tiny_model

SPANS = [(3, 7), (20, 23)]
PLACES = {3, 4, 5, 6, 20, 21, 22}
BOTH = {"budget": 40, "window_size": 8}

METHODS = {
    "snapkv": SnapKV(**BOTH),
    "snapkv by query head": SnapKV(group_reduce="none", **BOTH),
    "snapkv fading": SnapKV(pooling="fading", **BOTH),
    "snapkv by ratio": SnapKV(keep_ratio=0.4, window_size=8),
    "snapkv by itself": SnapKV(budget=AutoBudget(lost_vote=0.05, least=4), window_size=8),
    "adakv by itself": AdaKV(SnapKV(budget=AutoBudget(lost_vote=0.05, least=4), window_size=8)),
    "pyramidkv": PyramidKV(beta=2, **BOTH),
    "adakv": AdaKV(SnapKV(**BOTH)),
    "adakv of expected-attention": AdaKV(ExpectedAttention(**BOTH)),
    "criticalkv": CriticalKV(SnapKV(**BOTH)),
    "adakv of criticalkv": AdaKV(CriticalKV(SnapKV(**BOTH))),
    "score-threshold": ScoreThreshold(SnapKV(**BOTH), at_least=0.016),
    "expected-attention": ExpectedAttention(**BOTH),
    "full": FullCache(),
    "h2o": H2O(budget=40),
    "streaming-llm": StreamingLLM(budget=40, positions="original"),
    "tova": TOVA(budget=40),
    "scissorhands": Scissorhands(budget=40, recent=4, drop=6, history=16),
    "r-kv": RKV(budget=40, evict_every=3),
    "fastgen": FastGen(
        0.2, local_ratio=0.1, frequent_ratio=0.1, special_ids=(1,), punctuation_ids=(5, 9)
    ),
    "duo-attention": DuoAttention([[1, 0], [0, 0]] * 2, sink_tokens=2, recent_tokens=30),
    "prompt-then-decode": PromptThenDecode(prompt=SnapKV(**BOTH), decode=TOVA(budget=42)),
    "snapkv, then h2o": PromptThenDecode(prompt=SnapKV(**BOTH), decode=H2O(budget=42)),
    "keydiff": KeyDiff(**BOTH),
    "lagkv": LagKV(**BOTH, lag_size=8),
    "compactor": Compactor(**BOTH, chunk_tokens=16),
    "random": Random(**BOTH),
    "kvzip": KVzip(**BOTH),
}


NO_BUDGET = ("fastgen", "duo-attention", "snapkv by itself", "adakv by itself", "score-threshold")


def test_every_method_is_here():
    names = {policy.name for policy in METHODS.values()}
    assert names == set(methods.POLICIES)


def _positions(cache, rows):
    """For every row the positions that each layer and head holds."""
    held = [[] for _ in range(rows)]
    for index in cache.compressed_layers:
        kept = cache.kept_positions(index)
        for row in range(rows):
            held[row] += [set(head[head >= 0].tolist()) for head in kept[row]]
    return held


def _generate(model, cache, ids, mask, new_tokens=4):
    return model.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=new_tokens,
        do_sample=False,
        disable_compile=True,
    )


def _padded(rows):
    """Two rows, the second of which begins with pads, or both whole."""
    ids = random_ids(2, 90)
    mask = torch.ones_like(ids)
    if rows == "pads":
        mask[1, :17] = 0
        ids = ids.masked_fill(mask == 0, 0)
    return ids, mask


def _talk(model, policy, ids, mask, prompts, **options):
    """One or two turns; the positions and the counts after each, and all tokens."""
    cache, found = CompressedCache(model, policy, **options), []
    if policy.reads_twice:
        with torch.no_grad():
            read_twice(model, ids, cache)
        return cache, [(_positions(cache, 2), cache.report().kept_tokens)], ids
    text = ids
    for turn in range(prompts):
        if turn:
            new = random_ids(2, 30, 7)
            text = torch.cat([text, new], dim=1)
            mask = torch.cat([mask, mask.new_ones(2, text.shape[1] - mask.shape[1])], dim=1)
        text = _generate(model, cache, text, mask)
        found.append((_positions(cache, 2), cache.report().kept_tokens))
    return cache, found, text


@pytest.mark.parametrize("rows", ["whole", "pads"])
@pytest.mark.parametrize("name", METHODS)
def test_protected_positions_stay_over_two_turns_at_the_same_price(name, rows):
    policy = METHODS[name]
    if policy.reads_twice and rows == "pads":
        pytest.skip("a text is read twice without pads")
    model, (ids, mask) = tiny_model("llama"), _padded(rows)
    _, plain, text = _talk(model, policy, ids, mask, 2)
    _, empty, same = _talk(model, policy, ids, mask, 2, protect=[])
    assert torch.equal(text, same)
    assert plain == empty
    _, found, _ = _talk(model, policy, ids, mask, 2, protect=SPANS)
    for (held, kept), (_, plain_kept) in zip(found, plain, strict=True):
        assert all(head >= PLACES for row in held for head in row)
        if name not in NO_BUDGET:
            assert kept == plain_kept
    missing = [head for row in plain[0][0] for head in row if not head >= PLACES]
    assert missing or policy.name == "full", "the scores alone keep them all"


STORAGES = {
    "static": {"storage": "static", "room_tokens": 64},
    "int8": {"quantize": "int8"},
    "compress": {"turns": "compress"},
    "recall": {"recall": "host"},
    "recall, static": {"recall": "host", "storage": "static", "room_tokens": 64},
    "refresh": {"recall": "host", "refresh_every": 3},
    "compress, int8": {"turns": "compress", "quantize": "int8"},
}


@pytest.mark.parametrize("rows", ["whole", "pads"])
@pytest.mark.parametrize("storage", STORAGES)
def test_protected_positions_stay_in_every_storage(storage, rows, tmp_path):
    """Positions of the second prompt stay where that is compressed too."""
    model, (ids, mask), spans = tiny_model("llama"), _padded(rows), [*SPANS, (85, 88)]
    policy, options = METHODS["snapkv"], STORAGES[storage]
    _, plain, _ = _talk(model, policy, ids, mask, 2, **options)
    cache, found, _ = _talk(model, policy, ids, mask, 2, protect=spans, **options)
    assert all(head >= PLACES for held, _ in found for row in held for head in row)
    assert [kept for _, kept in found] == [kept for _, kept in plain]
    last = found[-1][0]
    assert all({85, 86, 87} <= head for row in last for head in row)
    assert all(_positions(copy.copy(cache), 2)[row] == last[row] for row in range(2))
    cache.save(tmp_path / "cache")
    loaded = CompressedCache.load(tmp_path / "cache", model)
    assert loaded.options["protect"] == [[3, 7], [20, 23], [85, 88]]
    assert _positions(loaded, 2) == last
    loaded.reset()
    again = CompressedCache(model, policy, protect=spans, **options)
    for one in (loaded, again):
        _generate(model, one, ids, mask)
    assert _positions(loaded, 2) == _positions(again, 2)


@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3", "qwen3"])
@pytest.mark.parametrize("name", ["snapkv", "h2o", "tova", "expected-attention"])
def test_protected_positions_stay_in_other_families(family, name):
    model, (ids, mask) = tiny_model(family, "eager"), _padded("pads")
    if name == "expected-attention" and family == "deepseek_v3":
        name = "keydiff"
    _, found, _ = _talk(model, METHODS[name], ids, mask, 1, protect=SPANS)
    assert all(head >= PLACES for row in found[0][0] for head in row)


@torch.no_grad()
@pytest.mark.parametrize("way", ["layers", "cap"])
def test_protected_positions_stay_however_the_prompt_is_read(way):
    model, ids = tiny_model("llama"), random_ids(1, 150)
    cache = CompressedCache(model, METHODS["snapkv"], protect=[*SPANS, (120, 124)])
    reading = (
        layer_by_layer(model, chunk_tokens=13)
        if way == "layers"
        else chunked(model, cap_tokens=44, chunk_tokens=17)
    )
    with reading:
        _generate(model, cache, ids, None)
    held = _positions(cache, 1)
    assert all(PLACES | {120, 121, 122, 123} <= head for head in held[0])


def test_a_span_past_the_end_protects_what_is_there():
    model, ids = tiny_model("llama"), random_ids(1, 90)
    cache = CompressedCache(model, SnapKV(budget=40, window_size=8), protect=[(76, 10_000)])
    with torch.no_grad():
        model(ids, past_key_values=cache)
    held = _positions(cache, 1)
    assert all(set(range(76, 90)) <= head for head in held[0])


ROOM = {
    "snapkv": (SnapKV(budget=40, window_size=8), 32),
    "adakv": (AdaKV(CriticalKV(SnapKV(budget=40, window_size=8))), 32),
    "threshold": (ScoreThreshold(SnapKV(budget=40, window_size=8)), 32),
    "h2o": (H2O(budget=40), 20),
    "tova": (TOVA(budget=40), 39),
    "streaming": (StreamingLLM(budget=40, positions="original"), 35),
    "scissorhands": (Scissorhands(budget=40, recent=4, drop=6, history=16), 31),
    "r-kv": (RKV(budget=40, evict_every=3), 32),
    "both": (PromptThenDecode(prompt=SnapKV(**BOTH), decode=H2O(budget=50)), 25),
}


@pytest.mark.parametrize("name", ROOM)
def test_more_than_can_ever_fit_is_refused_at_once_and_the_most_fits(name):
    policy, room = ROOM[name]
    model, ids = tiny_model("llama"), random_ids(1, 90)
    with pytest.raises(InvalidArgumentError, match=f"at most {room} tokens.* got {room + 1};"):
        CompressedCache(model, policy, protect=[(0, room + 1)])
    cache = CompressedCache(model, policy, protect=[(0, room)])
    _generate(model, cache, ids, None, new_tokens=20)
    assert all(set(range(room)) <= head for head in _positions(cache, 1)[0])


@pytest.mark.parametrize("policy", [METHODS["snapkv by ratio"], METHODS["pyramidkv"]])
def test_what_only_the_prompt_can_tell_is_refused_before_anything_is_dropped(policy):
    """The top layer of a pyramid has least room; the first layer already refuses for it."""
    model, ids = tiny_model("llama"), random_ids(1, 90)
    protect = [(0, 32)] if policy.name == "pyramidkv" else [(2, 80)]
    cache = CompressedCache(model, policy, protect=protect)
    with torch.no_grad(), pytest.raises(InvalidArgumentError, match="protect: expected at most"):
        model(ids, past_key_values=cache)
    assert cache.kept_positions(0)[0, 0].tolist() == list(range(90))
    cache.reset()
    with torch.no_grad():
        model(ids[:, :9], past_key_values=cache)


def test_sinks_and_spans_have_to_fit_together():
    model, ids = tiny_model("llama"), random_ids(1, 90)
    cache = CompressedCache(model, ExpectedAttention(**BOTH), protect=[(10, 40)])
    with (
        torch.no_grad(),
        pytest.raises(InvalidArgumentError, match=r"at most 32 .*4 sinks included, got 34"),
    ):
        model(ids, past_key_values=cache)


def test_methods_that_cannot_keep_spans_are_refused_by_name():
    @dataclass(frozen=True)
    class Own(SnapKV):
        name = "own"

        def select(self, layer):
            return None

    model = tiny_model("llama")
    with pytest.raises(InvalidArgumentError, match=r"protect: .*got .*Own\("):
        CompressedCache(model, Own(), protect=[(0, 1)])
    with pytest.raises(InvalidArgumentError, match="positions='original'"):
        CompressedCache(model, StreamingLLM(budget=40), protect=[(0, 1)])
    with pytest.raises(InvalidArgumentError, match=r"fair: .*H2O"):
        CompressedCache(model, H2O(budget=40), fair={"a": (0, 9)})
    for policy in (METHODS["adakv"], METHODS["criticalkv"]):
        with pytest.raises(InvalidArgumentError, match="fair: expected a method"):
            CompressedCache(model, policy, fair={"a": (0, 9)})
    with pytest.raises(InvalidArgumentError, match="fair: expected a cache that chooses"):
        CompressedCache(model, SnapKV(40), fair={"a": (0, 9)}, turns="compress")
    cache = CompressedCache(model, SnapKV(budget=40, window_size=8), fair={"a": (0, 9)})
    with (
        chunked(model, cap_tokens=44, chunk_tokens=17),
        pytest.raises(InvalidArgumentError, match="fair: expected none where"),
    ):
        _generate(model, cache, random_ids(1, 90), None)


@pytest.mark.parametrize("rows", ["whole", "pads"])
@pytest.mark.parametrize("name", ["snapkv", "keydiff", "lagkv", "pyramidkv", "expected-attention"])
@pytest.mark.parametrize("protect", [[], SPANS])
def test_every_segment_keeps_its_share(name, rows, protect):
    """The counts of every head are those of the shares, of each row's own prefix."""
    model, (ids, mask) = tiny_model("llama"), _padded(rows)
    fair = {"rules": (0, 20), "contract": (20, 60)}
    _, plain, _ = _talk(model, METHODS[name], ids, mask, 1)
    options = {"fair": fair, "protect": protect}
    cache, found, _ = _talk(model, METHODS[name], ids, mask, 1, **options)
    held, kept = found[0]
    assert kept == plain[0][1]
    for row, heads in enumerate(held):
        prefix = int(mask[row].sum()) - 8
        for head in heads:
            inside = [position for position in head if position < prefix]
            parts = [
                (20, sum(position < 20 for position in inside)),
                (40, sum(20 <= position < 60 for position in inside)),
                (prefix - 60, sum(position >= 60 for position in inside)),
            ]
            if not protect and name != "expected-attention":
                for tokens, stayed in parts:
                    assert abs(stayed - len(inside) * tokens / prefix) < 1
            assert all(stayed for _, stayed in parts)
            if protect:
                assert head >= PLACES
    assert cache.options["fair"] == {"rules": [0, 20], "contract": [20, 60]}


def test_segments_are_shared_anew_at_every_turn_with_recall():
    model, (ids, mask) = tiny_model("llama"), _padded("whole")
    options = {"fair": {"rules": (0, 20)}, "recall": "host"}
    _, found, text = _talk(model, METHODS["snapkv"], ids, mask, 2, **options)
    prefix = text.shape[1] - 4 - 8
    for head in found[-1][0][0]:
        assert abs(sum(position < 20 for position in head) - 32 * 20 / prefix) < 1
