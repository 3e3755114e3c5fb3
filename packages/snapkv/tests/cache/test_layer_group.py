"""Grouped layers keep the same positions as separate layers, and report what they lost."""

from dataclasses import replace

import pytest
import torch

from snapkv import AcrossLayers, CacheMismatchError, CompressedCache, SnapKV
from snapkv.cache import layer_group
from snapkv.cache.chooser import Chooser
from snapkv.cache.layer import CompressedLayer, LayerIdentity
from snapkv.policies.states import LostVotes
from tests.families import call, peaked_model, random_ids, tiny_config, tiny_model
from tests.methods import BOTH, CACHES, METHODS
from tests.ops.states import pad_left, random_layer
from tests.policies.reading import ended

VOTING = ("snapkv", "snapkv by query head", "snapkv by itself", "pyramidkv", "adakv")
POLICIES = {name: METHODS[name] for name in VOTING} | {
    "across-layers": AcrossLayers(SnapKV(**BOTH, sink_tokens=2)),
    "across-layers by the largest": AcrossLayers(SnapKV(**BOTH, window_reduce="max")),
}


@pytest.fixture
def prompts():
    """Return the prompts of seven layers, with two rows each, one of them padded."""
    return [
        pad_left(
            [
                random_layer(9 * depth + row, prompt_tokens=tokens, query_tokens=8)
                for row, tokens in enumerate((120, 95))
            ],
            query_tokens=8,
        )
        for depth in range(7)
    ]


@pytest.fixture
def wait(monkeypatch):
    """Let layers wait as on a GPU, as long as they hold at most `most_bytes` bytes."""

    def up_to(most_bytes):
        monkeypatch.setattr(layer_group, "MOST_BYTES", {"cpu": most_bytes})

    return up_to


@pytest.mark.parametrize("most_bytes", [0, 50_000])
@pytest.mark.parametrize("name", POLICIES)
def test_lost_mass_of_a_layer_is_that_of_its_evicted_positions(name, most_bytes, prompts, wait):
    wait(most_bytes)
    policy, found = POLICIES[name], []
    for layer, prompt in zip(ended(policy, prompts), prompts, strict=True):
        if layer.slots.kept is None:
            assert layer.state.lost_mass is None
            continue
        votes = policy.votes_at_stake(prompt)
        kept = layer.slots.kept.long()
        empty = layer.slots.padding_slots
        if empty is not None:
            kept = kept.masked_fill(torch.arange(kept.shape[2]) < empty[:, None, None], -1)
        lost = LostVotes.of(votes.votes, votes.faded_shares(), kept, prompt.keys.shape[2])
        torch.testing.assert_close(layer.state.lost_mass, lost.mass)
        torch.testing.assert_close(layer.state.lost_peak, lost.peak, rtol=0, atol=0)
        found.append(float(lost.mass.max()))
    assert max(found) > 0


@pytest.mark.parametrize("tokens", [90, 7])
@pytest.mark.parametrize("name", [*VOTING, "across-layers", "fastgen", "h2o", "int4", "recall"])
@torch.no_grad()
def test_grouped_layers_keep_the_same_positions_as_separate_layers(name, tokens, wait):
    policy, options = CACHES[name]
    model, ids, mask = tiny_model("llama"), random_ids(2, tokens), torch.ones(2, tokens).long()
    mask[0, : tokens // 5] = 0
    found = []
    for most_bytes in (0, 70_000, 1 << 30):
        wait(most_bytes)
        cache = CompressedCache(model, policy, **options)
        for turn in (ids, ids[:, :30]):
            cache.expect_tokens(turn)
            logits = call(model, cache, turn, attention_mask=mask)
            mask = torch.cat([mask, torch.ones(2, turn.shape[1]).long()], dim=1)
        mask = mask[:, :tokens]
        kept = [cache.kept_positions(layer) for layer in cache.compressed_layers]
        whole = [layer.slots.kept is None for layer in cache.prompt_state.layers]
        held = [(layer.store.kind, layer.held_bytes) for layer in cache.prompt_state.layers]
        found.append((kept, logits, cache.report()["lost_votes"], whole, held))
    for kept, logits, lost, *others in found[1:]:
        assert all(map(torch.equal, kept, found[0][0]))
        torch.testing.assert_close(logits, found[0][1])
        assert lost == pytest.approx(found[0][2])
        assert others == list(found[0][3:])


@pytest.mark.parametrize("name", ["snapkv", "adakv"])
def test_layers_with_different_head_counts_keep_the_same_positions_as_alone(name, wait):
    heads = (2, 2, 1, 1, 4)
    shapes = [{"query_heads": 4, "kv_heads": each} for each in heads]
    prompts = [
        random_layer(depth, prompt_tokens=90, query_tokens=8, **shape)
        for depth, shape in enumerate(shapes)
    ]
    found = []
    for most_bytes in (0, 1 << 30):
        wait(most_bytes)
        found.append([layer.stored_positions() for layer in ended(METHODS[name], prompts)])
    assert all(map(torch.equal, *found))


def test_waiting_layers_hold_only_the_voting_queries(wait):
    wait(1 << 30)
    group, prompt = layer_group.LayerGroup(), random_layer(0, prompt_tokens=90, query_tokens=90)
    voting = replace(prompt, queries=prompt.queries[:, :, -8:], num_layers=2)
    identity = LayerIdentity(layer_idx=0, num_layers=2)
    group.add(CompressedLayer(METHODS["snapkv"], identity, None), voting)
    held = group.prompts[0].queries
    assert held.untyped_storage().nbytes() == held.nbytes


def stacks(model, cache, ids, monkeypatch):
    """Return how many layers selected together, for each selection in order."""
    found, own = [], Chooser._choose

    def choose(chooser, **options):
        found.append(len(chooser.group))
        own(chooser, **options)

    monkeypatch.setattr(Chooser, "_choose", choose)
    call(model, cache, ids)
    return found


class Curious(SnapKV):
    """A user-defined method, whose score depends on the layer."""

    def score(self, layer):
        return super().score(layer) + layer.depth


ALONE = {"kvzap", "criticalkv", "expected-attention", "random", "h2o", "full"}
TOGETHER = {
    "snapkv", "snapkv by query head", "snapkv by itself", "pyramidkv", "adakv", "keydiff", "lagkv",
    "across-layers", "across-layers by itself",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ALONE | TOGETHER))
def test_only_layer_independent_methods_select_for_all_layers_at_once(name, wait, monkeypatch):
    wait(1 << 30)
    model, policy = tiny_model("llama"), METHODS[name]
    expected = [4] if name in TOGETHER else [1] * 4
    assert stacks(model, CompressedCache(model, policy), random_ids(1, 90), monkeypatch) == expected


def test_user_defined_method_selects_layer_by_layer(wait, monkeypatch):
    wait(1 << 30)
    cache = CompressedCache(model := tiny_model("llama"), Curious(**BOTH))
    assert stacks(model, cache, random_ids(1, 90), monkeypatch) == [1] * 4


def test_layers_wait_only_for_similar_layers_and_below_the_byte_limit(wait, monkeypatch):
    model, ids = tiny_model("llama"), random_ids(1, 90)
    layer_bytes = 2 * 2 * 90 * 8 * 4  # keys and values of two heads
    for most_bytes, expected in ((2 * layer_bytes, [2, 2]), (2 * layer_bytes + 1, [3, 1])):
        wait(most_bytes)
        cache = CompressedCache(model, SnapKV(**BOTH))
        with monkeypatch.context() as patch:
            assert stacks(model, cache, ids, patch) == expected
    wait(1 << 30)
    config = tiny_config("gpt_oss")  # whose layers have sinks of their own
    other = peaked_model(config, "eager")
    cache = CompressedCache(other, SnapKV(budget=20, window_size=4))
    assert set(stacks(other, cache, ids, monkeypatch)) == {1}


def test_cache_refuses_tokens_after_a_pass_was_interrupted_while_layers_waited(wait, monkeypatch):
    wait(1 << 30)
    model, ids = tiny_model("llama"), random_ids(1, 90)
    cache = CompressedCache(model, SnapKV(**BOTH))
    mlp = model.model.layers[2].mlp
    with monkeypatch.context() as patch:
        patch.delattr(type(mlp), "forward")
        with pytest.raises(NotImplementedError):
            call(model, cache, ids)
    with pytest.raises(CacheMismatchError, match="reset"):
        call(model, cache, ids[:, :1])
    cache.reset()
    call(model, cache, ids)
    assert cache.report()["kept_tokens"] == 40
