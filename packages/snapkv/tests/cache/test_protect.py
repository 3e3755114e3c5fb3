"""Protected positions are kept in every layer and head, with every method, storage and turn."""

import copy
import functools
from dataclasses import dataclass

import pytest
import torch

import snapkv.policies as methods
from snapkv import CompressedCache, InvalidArgumentError
from snapkv.kvzip import read_twice
from snapkv.policies import H2O, PromptThenDecode, SnapKV
from snapkv.prefill import layer_by_layer
from tests.families import call, generated, random_ids, tiny_model
from tests.methods import BOTH, METHODS

SPANS = [(3, 7), (20, 23)]
PLACES = {3, 4, 5, 6, 20, 21, 22}
BY_ITSELF = ("fastgen", *(name for name in METHODS if name.endswith("by itself")))
ONE_OF_EACH = {type(policy): name for name, policy in METHODS.items() if "moved" not in name}
"""The last variant of every method that can protect spans."""


def test_every_method_has_a_case():
    assert {policy.name for policy in METHODS.values()} == set(methods.POLICIES)


def _positions(cache):
    """Return, for every row, a set of kept positions for each layer and head."""
    kept = [cache.kept_positions(index) for index in cache.compressed_layers]
    return [
        [set(head[head >= 0].tolist()) for layer in kept for head in layer[row]]
        for row in range(len(kept[0]))
    ]


_generate = functools.partial(generated, max_new_tokens=3, disable_compile=True)


def _talk(policy, *, padded=True, prompts=1, model="llama", **options):
    """Read turns of two rows; return the cache, the kept positions of each turn, and the text."""
    model = tiny_model(model, "sdpa" if model == "llama" else "eager")
    cache, found, text = CompressedCache(model, policy, **options), [], random_ids(2, 90)
    if policy.needs_reconstruction_pass:
        with torch.no_grad():
            read_twice(model, text, cache)
        return cache, [(_positions(cache), cache.report().kept_tokens)], text
    mask = torch.ones_like(text)
    if padded:
        mask[1, :17] = 0
        text = text.masked_fill(mask == 0, 0)
    for turn in range(prompts):
        if turn:
            text = torch.cat([text, random_ids(2, 30, 7)], dim=1)
            mask = torch.cat([mask, mask.new_ones(2, text.shape[1] - mask.shape[1])], dim=1)
        text = _generate(model, cache, text, attention_mask=mask)
        found.append((_positions(cache), cache.report().kept_tokens))
    return cache, found, text


@pytest.mark.parametrize("name", ["snapkv", "across-layers", *ONE_OF_EACH.values()])
def test_protected_positions_are_kept_over_two_turns_within_the_same_budget(name):
    policy = METHODS[name]
    _, plain, _ = _talk(policy, prompts=2)
    _, found, _ = _talk(policy, prompts=2, protect=SPANS)
    for (held, kept), (_, plain_kept) in zip(found, plain, strict=True):
        assert all(head >= PLACES for row in held for head in row)
        assert name in BY_ITSELF or kept == plain_kept
    missing = [head for row in plain[0][0] for head in row if not head >= PLACES]
    assert missing or policy.name == "full", "the scores alone keep them all"


def test_an_empty_list_of_spans_protects_nothing():
    plain, empty = (_talk(METHODS["snapkv"], **given)[1:] for given in ({}, {"protect": []}))
    assert plain[0] == empty[0]
    assert torch.equal(plain[1], empty[1])


STORAGES = {
    "compress, int8": {"turns": "compress", "quantize": "int8"},
    "recall": {"recall": "host"},
}


@pytest.mark.parametrize("options", STORAGES.values(), ids=STORAGES)
def test_protected_positions_are_kept_in_every_storage_and_after_saving(options, tmp_path):
    """Positions of the second prompt are kept if that prompt is compressed, too."""
    policy, spans = METHODS["snapkv"], [*SPANS, (85, 88)]
    _, plain, _ = _talk(policy, prompts=2, **options)
    cache, found, _ = _talk(policy, prompts=2, protect=iter(spans), **options)
    assert all(head >= PLACES for held, _ in found for row in held for head in row)
    assert [kept for _, kept in found] == [kept for _, kept in plain]
    last = found[-1][0]
    assert all({85, 86, 87} <= head for row in last for head in row)
    assert _positions(copy.copy(cache)) == last
    cache.save(tmp_path / "cache")
    loaded = CompressedCache.load(tmp_path / "cache", cache.model)
    assert loaded.options["protect"] == [[3, 7], [20, 23], [85, 88]]
    assert _positions(loaded) == last
    loaded.reset()
    _generate(cache.model, loaded, random_ids(2, 90))
    assert all(head >= PLACES for row in _positions(loaded) for head in row)


def test_protected_positions_are_kept_in_layer_by_layer_prefill():
    model, ids = tiny_model("llama"), random_ids(1, 150)
    cache = CompressedCache(model, METHODS["snapkv"], protect=[*SPANS, (140, 10_000)])
    with layer_by_layer(model, chunk_tokens=13):
        _generate(model, cache, ids)
    assert all(PLACES | set(range(140, 150)) <= head for head in _positions(cache)[0])


ROOM = {
    "adakv of criticalkv": 32,
    "h2o": 20,
    "tova": 39,
    "streaming-llm": 35,
    "scissorhands": 31,
    "r-kv": 32,
}


@pytest.mark.parametrize("name", [*ROOM, "both"])
def test_constructor_refuses_more_protected_tokens_than_fit_and_accepts_the_most(name):
    both = PromptThenDecode(prompt=SnapKV(**BOTH), decode=H2O(budget=50))
    policy, room = (both, 25) if name == "both" else (METHODS[name], ROOM[name])
    model, ids = tiny_model("llama"), random_ids(1, 90)
    with pytest.raises(InvalidArgumentError, match=rf"at most {room} tokens.* got {room + 1}\."):
        CompressedCache(model, policy, protect=[(0, room + 1)])
    cache = CompressedCache(model, policy, protect=[(0, room)])
    _generate(model, cache, ids, max_new_tokens=20)
    assert all(set(range(room)) <= head for head in _positions(cache)[0])


@pytest.mark.parametrize(
    ("name", "protect"),
    [
        ("snapkv by ratio", (2, 80)),
        ("pyramidkv", (0, 32)),  # the top layer has least room; the first one refuses for it
        ("expected-attention", (10, 40)),  # with its sinks
    ],
)
def test_protection_that_does_not_fit_the_prompt_is_refused_before_eviction(name, protect):
    model, ids = tiny_model("llama"), random_ids(1, 90)
    cache = CompressedCache(model, METHODS[name], protect=[protect])
    with pytest.raises(InvalidArgumentError, match="protect: expected at most"):
        call(model, cache, ids)
    assert cache.kept_positions(0)[0, 0].tolist() == list(range(90))
    cache.reset()
    call(model, cache, ids[:, :9])


def test_user_defined_method_that_cannot_protect_is_refused_by_name():
    @dataclass(frozen=True)
    class Own(SnapKV):
        name = "own"

        def select(self, layer):
            return None

    with pytest.raises(InvalidArgumentError, match=r"protect: .*Own\(.*cannot protect"):
        CompressedCache(tiny_model("llama"), Own(), protect=[(0, 1)])
