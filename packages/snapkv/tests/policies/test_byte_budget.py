"""Budgets in bytes: the cache holds the given bytes after a prompt, or slightly less."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from snapkv import (
    AcrossLayers,
    AdaKV,
    ByteBudget,
    CompressedCache,
    InvalidArgumentError,
    KVzip,
    SnapKV,
)
from snapkv.kvzip import read_twice
from snapkv.ops import TokenCost
from snapkv.policies.prefix import Prefix
from snapkv.storage.bits import KVCodes
from snapkv.storage.dense import DenseStore
from tests.families import random_ids, read, tiny_model
from tests.ops.states import worked_layer

CODES = TokenCost(full_bytes=8, block_bytes=12, block_tokens=4)
BARE = TokenCost(full_bytes=8, block_bytes=8)


def worked(cost, tokens, depth=0, pads=(0,)):
    """Return one of two layers, whose tokens have the given cost."""
    states = torch.zeros(len(pads), 1, tokens, 2, dtype=torch.float16)
    pad_tokens = torch.tensor(pads) if any(pads) else None
    place = {"layer_idx": depth, "depth": depth, "num_layers": 2}
    return worked_layer(states, pad_tokens=pad_tokens, token_cost=lambda: cost, **place)


@pytest.mark.parametrize(
    ("budget", "cost", "of_each"),
    [
        # A fourth block is what heads may fill in part, 3 tokens of each.
        ("100B", replace(CODES, uneven=True), [13, 13]),
        ("90B", replace(CODES, uneven=True), [13, 9]),
        ("160B", BARE, [10, 10]),
        ("170B", BARE, [11, 10]),  # 10 left over: one token more, in the first layer
        ("10%", BARE, [5, 5]),  # 50 tokens take 400 bytes in a layer
        ("100B", CODES, [16, 16]),  # eight blocks of 12
        ("90B", CODES, [16, 12]),  # seven
        ("12%", CODES, [16, 16]),  # of 800 bytes 96, nothing left over
        ("1%", CODES, [4, 4]),  # less than the block that holds window and sinks, which is filled
        ("1%", replace(CODES, uneven=True), [3, 3]),  # another token could begin a second block
        ("1%", BARE, [3, 3]),
    ],
)
def test_tokens_of_each_layer_equal_a_worked_example(budget, cost, of_each):
    budget = ByteBudget.read(budget)
    prefixes = [Prefix(worked(cost, 50, depth), 1, 2) for depth in (0, 1)]
    assert [1 + budget.counts(prefix, None)[0] for prefix in prefixes] == of_each


def test_share_is_of_the_prompt_of_each_row_and_bytes_are_for_every_row():
    layer = worked(BARE, 50, pads=(0, 30))
    prefix = Prefix(layer, window_size=1, sink_tokens=1)
    assert ByteBudget(share=0.2).counts(prefix, None) == [9, 3]
    assert ByteBudget(bytes=160).counts(prefix, None) == [9, 9]


def test_cost_of_a_token_equals_a_worked_example():
    """Two heads of 32 float32 numbers take 512 bytes a token; scales and minima take two bytes."""
    states = torch.ones(1, 2, 50, 32)
    store = DenseStore().fill(states, states, 2)
    assert store.token_cost(2, None) == TokenCost(full_bytes=512, block_bytes=512)
    keys, values = 32 * 32 + 32 * 4, 32 * 16 + 32 * 4
    found = store.token_cost(4, KVCodes(8, 4))  # each query head its own
    block_bytes = 4 * (keys + values)
    assert found == TokenCost(full_bytes=512, block_bytes=block_bytes, block_tokens=32)


def test_values_beyond_float16_cost_wider_scales():
    states = torch.full((1, 2, 50, 32), 1e5)
    store = DenseStore().fill(states, states, 2)
    assert store.token_cost(2, KVCodes(8, 8)).block_bytes == 4 * (1024 + 256)


WINDOW = {"window_size": 8}


def held(cache):
    return [row["held_bytes"] for row in cache.report()["layers"]]


@pytest.mark.parametrize(
    ("quantize", "budget", "tokens"),
    [
        (None, "45%", 230),
        ("int8", "23%", 300),
        ("int4", "60000B", 301),
        (KVCodes(4, 8, group_size=64), "45%", 230),
        ("K8V4", "60000B", 301),
    ],
    ids=str,
)
def test_held_bytes_are_below_the_budget_by_less_than_one_token(quantize, budget, tokens):
    """One more token in any layer would exceed the budget."""
    model, ids = tiny_model("llama"), random_ids(1, tokens)
    cache = read(model, SnapKV(budget, **WINDOW), ids, quantize=quantize)
    found = ByteBudget.read(budget)
    given = found.bytes or Fraction(str(found.share)) * cache.report().full_bytes
    kept = [row["kept_tokens"] for row in cache.report()["layers"]]
    assert sum(held(cache)) <= given
    for own, count in zip(held(cache), kept, strict=True):
        if count < tokens:
            larger = held(read(model, SnapKV(count + 1, **WINDOW), ids, quantize=quantize))[-1]
            assert sum(held(cache)) - own + larger > given


def test_protected_tokens_are_kept_within_the_budget_in_bytes_or_refused():
    model, ids = tiny_model("llama"), random_ids(1, 300)
    cache = read(model, SnapKV("20%", **WINDOW), ids, protect=[(10, 50)])
    assert set(range(10, 50)) <= set(cache.kept_positions(0)[0, 0].tolist())
    with pytest.raises(InvalidArgumentError, match="protect"):
        read(model, SnapKV("20%", **WINDOW), ids, protect=[(10, 100)])


@pytest.mark.parametrize(("around", "too_far"), [(AdaKV, 232), (AcrossLayers, 263)])
def test_protected_tokens_in_codes_fit_the_budget_in_bytes_or_are_refused(around, too_far):
    """The heads of AdaKV may fill a block partly, so fewer tokens fit."""
    model, ids = tiny_model("llama"), random_ids(1, 300)
    policy = around(KVzip("30%", window_size=4, sink_tokens=0))
    cache = CompressedCache(model, policy, quantize="int8", protect=[(10, too_far)])
    with pytest.raises(InvalidArgumentError, match="protect: expected at most"):
        read_twice(model, ids, cache)
    cache = CompressedCache(model, policy, quantize="int8", protect=[(10, too_far - 32)])
    read_twice(model, ids, cache)
    for index in range(4):
        for head in cache.kept_positions(index)[0]:
            assert set(range(10, too_far - 32)) <= set(head.tolist())
    assert cache.report().held_bytes <= 0.3 * cache.report().full_bytes


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("12%", {"share": 0.12}),
        (" 12.5 % ", {"share": 0.125}),
        ("100%", {"share": 1.0}),
        ("64MiB", {"bytes": 64 * 2**20}),
        ("1.5kb", {"bytes": 1500}),
        ("7B", {"bytes": 7}),
    ],
)
def test_budget_from_a_text_equals_one_from_numbers_and_from_a_file(text, made):
    policy = SnapKV(text)
    assert policy.budget == ByteBudget(**made)
    assert policy.describe()["budget"] == {"bytes": {"share": None, "bytes": None} | made}
    assert SnapKV(policy.describe()["budget"]) == policy


@pytest.mark.parametrize(
    "budget", ["0%", "101%", "-5%", "0B", "-4MiB", {"bytes": {}}, {"bytes": {"part": 1}}]
)
def test_invalid_budget_in_bytes_is_refused(budget):
    with pytest.raises(
        InvalidArgumentError, match=r"^budget[^\n]*expected [^\n]*, but got [^\n]*\. [A-Z][^\n]*\.$"
    ):
        SnapKV(budget)


def test_budget_smaller_than_window_and_sinks_is_refused_with_the_smallest_one():
    model, ids = tiny_model("llama"), random_ids(1, 100)
    policy = SnapKV("3000B", sink_tokens=4, **WINDOW)
    for quantize, least in ((None, "6,144 bytes"), ("int8", "5,376 bytes")):
        with pytest.raises(InvalidArgumentError, match=f"budget: expected at least {least} ") as e:
            read(model, policy, ids, quantize=quantize)
        assert "\n" not in str(e.value)
        enough = SnapKV(least.replace(" bytes", "B").replace(",", ""), sink_tokens=4, **WINDOW)
        read(model, enough, ids, quantize=quantize)
