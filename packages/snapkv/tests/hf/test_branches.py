"""One pass over a tree of tokens gives each branch its own logits; the cache keeps one branch."""

import copy

import pytest
import torch

from snapkv import AdaKV, CompressedCache, FullCache, InvalidArgumentError, PyramidKV, SnapKV
from snapkv.hf import forward_context
from snapkv.hf.forward_context import branching
from snapkv_lab.medusa.masks import TreeBranches
from tests.families import call, random_ids, tiny_model
from tests.pairs import pairs

POLICY = SnapKV(36, window_size=8, kernel_size=5)
STORAGES = {
    "dense": (POLICY, {}),
    "uneven layers": (PyramidKV(36, window_size=8), {}),
    "heads of different length": (AdaKV(POLICY), {}),
    "a set per query head": (SnapKV(36, window_size=8, group_reduce="none"), {}),
    "codes": (POLICY, {"quantize": "int8"}),
    "queries that vote again": (POLICY, {"turns": "compress"}),
    "everything": (FullCache(), {}),
}
PROMPT = 80
TREE = ((0,), (0, 1), (0, 2), (0, 1, 3), (0, 2, 4))  # each node with those above it
BRANCHES = ([0, 1, 3], [0, 2, 4])
VISIBLE = torch.zeros(5, 5, dtype=torch.bool)
for _node, _seen in enumerate(TREE):
    VISIBLE[_node, list(_seen)] = True
DEPTHS = VISIBLE.sum(dim=-1) - 1


def read_cache(model, storage):
    policy, options = STORAGES[storage]
    cache = CompressedCache(model, policy, **options)
    call(model, cache, random_ids(1, PROMPT))
    cache.activate_past_recording()
    return cache


@pairs(storage=list(STORAGES), implementation=["sdpa", "eager"], branch=BRANCHES)
def test_each_branch_is_read_as_alone_and_one_can_be_kept(storage, implementation, branch):
    model = tiny_model("llama", implementation)
    cache = read_cache(model, storage)
    alone = copy.deepcopy(cache)
    tokens, following = random_ids(1, 5, seed=3), random_ids(1, 4, seed=4)
    with branching(TreeBranches(VISIBLE)):
        logits = call(model, cache, tokens, position_ids=(PROMPT + DEPTHS)[None])
    expected = call(model, alone, tokens[:, branch])
    torch.testing.assert_close(logits[:, branch], expected)
    cache.keep_among_last(5, torch.tensor(branch))
    assert cache.get_seq_length() == PROMPT + len(branch)
    for layer in range(len(cache.layers)):
        assert torch.equal(cache.kept_positions(layer), alone.kept_positions(layer))
    for own, other in zip(cache.layers, alone.layers, strict=True):
        if other.queries.last is not None:
            torch.testing.assert_close(own.queries.last, other.queries.last)
    torch.testing.assert_close(call(model, cache, following), call(model, alone, following))


REFUSED = {
    "tokens of the prompt": (6, [0, 1], "tokens: expected at most 5, .* got 6"),
    "tokens before there are any": (-1, [], "tokens: expected at most 5, .* got -1"),
    "a place behind the last": (
        5,
        [0, 5],
        "places: expected indices between 0 and 4",
    ),
    "a place before the first": (5, [-1, 0], "places: .*got \\[-1, 0\\]"),
    "a place twice": (5, [0, 0], "without repetitions"),
    "places that descend": (5, [2, 1], "ascending"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_keep_among_last_refuses_invalid_arguments_and_changes_nothing(why):
    tokens, places, said = REFUSED[why]
    cache = read_cache(model := tiny_model("llama"), "dense")
    call(model, cache, random_ids(1, 5, seed=3))
    before = [layer.keys.clone() for layer in cache.layers]
    with pytest.raises(InvalidArgumentError, match=said):
        cache.keep_among_last(tokens, torch.tensor(places, dtype=torch.int64))
    assert cache.get_seq_length() == PROMPT + 5
    assert all(
        torch.equal(own, layer.keys) for own, layer in zip(before, cache.layers, strict=True)
    )


def test_keep_among_last_requires_past_recording():
    model = tiny_model("llama")
    cache = CompressedCache(model, POLICY)
    call(model, cache, random_ids(1, PROMPT))
    call(model, cache, random_ids(1, 5, seed=3))
    with pytest.raises(InvalidArgumentError, match=r"Call activate_past_recording\(\) before"):
        cache.keep_among_last(5, torch.tensor([0, 2]))


def test_branches_are_cleared_after_failed_forward_pass():
    with pytest.raises(RuntimeError, match="stop"), branching(TreeBranches(VISIBLE)):
        raise RuntimeError("stop")
    assert forward_context.current.branches is None
