"""An error is raised if a layer does not compress its prompt; removed layers are left out."""

import copy
import sys
import threading

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaAttention

from snapkv import (
    AcrossLayers,
    CacheMismatchError,
    CompressedCache,
    SnapKV,
    UnsupportedModelError,
)
from snapkv.cache import layer_group
from tests.families import (
    call,
    generated,
    peaked_model,
    random_ids,
    small_config,
    tiny_config,
    tiny_model,
)
from tests.pairs import pairs

SNAPKV = SnapKV(24, window_size=8)
POLICIES = {"snapkv": SNAPKV, "across-layers": AcrossLayers(SNAPKV)}
WHERE = {"all": (0, 1, 2, 3), "first": (0,), "middle": (2,), "last": (3,)}
READ = ("at once", "in pieces", "by generate")


@pytest.fixture
def adds_a_key(monkeypatch):
    """Make layers of a model attend to one key more than the cache returned."""

    def in_layers(model, layers):
        family = sys.modules[type(model).__module__]
        own = family.ALL_ATTENTION_FUNCTIONS.get_interface

        class Interface(type(family.ALL_ATTENTION_FUNCTIONS)):
            def get_interface(self, name, default):
                attend = own(name, default)

                def attention(module, query, key, value, mask, **options):
                    if module.layer_idx in layers and name.startswith("snapkv|"):
                        key, value = (nn.functional.pad(one, (0, 0, 1, 0)) for one in (key, value))
                    return attend(module, query, key, value, mask, **options)

                return attention

        monkeypatch.setattr(family, "ALL_ATTENTION_FUNCTIONS", Interface())

    return in_layers


def read(model, cache, ids, how):
    mask = torch.ones_like(ids)
    mask[1:, :9] = 0
    if how == "by generate":
        return generated(model, cache, ids, attention_mask=mask)
    cache.expect_prompt(ids.shape[1])
    step = 20 if how == "in pieces" else ids.shape[1]
    for start in range(0, ids.shape[1], step):
        stop = min(start + step, ids.shape[1])
        logits = call(model, cache, ids[:, start:stop], attention_mask=mask[:, :stop])
    return logits


@pairs(name=list(POLICIES), implementation=["sdpa", "eager"], where=list(WHERE), how=READ)
def test_layer_that_adds_keys_is_refused_by_name(name, implementation, where, how, adds_a_key):
    model = peaked_model(tiny_config("llama"), implementation)
    cache, ids = CompressedCache(model, POLICIES[name]), random_ids(2, 70)
    adds_a_key(model, WHERE[where])
    said = rf"70|20 keys .* layer {WHERE[where][0]}, where LlamaAttention of .*modeling_llama"
    with pytest.raises(UnsupportedModelError, match=said):
        read(model, cache, ids, how)
    if WHERE[where][0]:
        with pytest.raises(CacheMismatchError, match=r"cache\.reset"):
            call(model, cache, ids[:, :1])
    else:
        assert cache.get_seq_length() == 0


def read_and_step(model, cache, ids):
    call(model, cache, ids)
    call(model, cache, ids[:, :1])


class Without(nn.Module):
    """A replacement of a layer's attention that returns the hidden states unchanged."""

    def forward(self, hidden_states, **kwargs):
        return hidden_states, None


@pairs(name=list(POLICIES), where=[(2,), (3,), (1, 2), (2, 3)], most_bytes=[0, 1 << 30])
def test_error_names_layer_without_attention(name, where, most_bytes, monkeypatch):
    """The attention is removed after the cache was made; `generate` and plain calls both fail."""
    monkeypatch.setattr(layer_group, "MOST_BYTES", {"cpu": most_bytes})
    model, ids = copy.deepcopy(tiny_model("llama")), random_ids(2, 70)
    said = rf"layer {', '.join(map(str, where))} did not attend.* cache\.reset"
    caches = [CompressedCache(model, POLICIES[name]) for _ in range(2)]
    for index in where:
        model.model.layers[index].self_attn = Without()
    with pytest.raises(CacheMismatchError, match=said):
        generated(model, caches[0], ids)
    with pytest.raises(CacheMismatchError, match=said):
        read_and_step(model, caches[1], ids)


def test_call_without_cache_after_interrupted_pass_gives_unchanged_logits():
    model, ids = copy.deepcopy(tiny_model("llama")), random_ids(1, 70)
    expected = model(ids[:, :30]).logits
    cache = CompressedCache(model, SNAPKV)
    cache.update(*torch.ones(2, 1, 2, 40, 8), 0)  # whose attention never comes
    assert torch.equal(model(ids[:, :30]).logits, expected)
    with pytest.raises(CacheMismatchError, match="interrupted"):
        call(model, cache, ids)
    cache.reset()
    call(model, cache, ids)
    assert cache.report().kept_tokens == 24


# Layers that were taken out.


def pruned(layers, *, is_counted):
    model = copy.deepcopy(tiny_model("llama"))
    model.model.layers = nn.ModuleList(model.model.layers[index] for index in layers)
    if is_counted:  # and numbered again
        model.config.num_hidden_layers = len(layers)
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.layer_idx = index
    return model


@pytest.mark.parametrize("layers", [(1, 2, 3), (0, 3), (2,)], ids=str)
@pytest.mark.parametrize("name", POLICIES)
def test_model_with_removed_layers_matches_renumbered_model(name, layers, tmp_path):
    """The budget is divided among the remaining layers only."""
    ids, mask = random_ids(2, 70), torch.ones(2, 70).long()
    mask[1, :9] = 0
    found, kept = [], []
    for is_counted in (False, True):
        model = pruned(layers, is_counted=is_counted)
        cache = CompressedCache(model, POLICIES[name])
        found.append(generated(model, cache, ids, attention_mask=mask))
        assert cache.compressed_layers == ([*range(len(layers))] if is_counted else [*layers])
        kept.append([cache.kept_positions(layer) for layer in cache.compressed_layers])
        report = cache.report()
        assert report["growing_layers"] == len(report["layers"]) == len(layers)
        assert report.chosen_tokens == 24
        assert [row["layer"] for row in report["layers"]] == cache.compressed_layers
        if not is_counted:
            cache.save(tmp_path / "cache")
            again = CompressedCache.load(tmp_path / "cache", model)
            assert all(map(torch.equal, kept[0], map(again.kept_positions, layers)))
            step = ids[:, :1]
            assert torch.equal(call(model, again, step), call(model, copy.copy(cache), step))
            cache.crop(-1)
            assert cache.get_seq_length() == cache.get_seq_length(0) == 74
    assert torch.equal(*found)
    assert all(map(torch.equal, *kept))


def test_removed_layer_is_skipped_when_last_layer_has_linear_attention():
    kinds = ["full_attention"] * 3 + ["linear_attention"]
    config = small_config("linear", layer_types=kinds, num_hidden_layers=4)
    model = peaked_model(config, "sdpa")
    del model.model.layers[0]
    cache = CompressedCache(model, POLICIES["across-layers"])
    call(model, cache, random_ids(1, 70) % config.vocab_size)
    assert cache.compressed_layers == [1, 2]
    assert cache.report().chosen_tokens == 24


def test_eager_attention_works_for_subclass_from_another_module():
    model, ids = copy.deepcopy(tiny_model("llama", "eager")), random_ids(1, 70)
    cache, plain = CompressedCache(model, SNAPKV), CompressedCache(model, SNAPKV)
    call(model, plain, ids)
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("Derived", (LlamaAttention,), {"__module__": __name__})
    call(model, cache, ids)
    assert torch.equal(cache.kept_positions(3), plain.kept_positions(3))


def test_layer_index_beyond_configured_layers_is_refused_by_name():
    model = copy.deepcopy(tiny_model("llama"))
    model.model.layers[3].self_attn.layer_idx = 7
    with pytest.raises(
        UnsupportedModelError, match=r"4 layers, but got keys of layer 7\. Set config"
    ):
        call(model, CompressedCache(model, SNAPKV), random_ids(1, 70))


def test_model_that_adds_copies_of_layers_to_the_cache_is_refused_by_name():
    """The family `dory` does this: each loop over its layers has keys of its own."""
    model = copy.deepcopy(tiny_model("llama"))
    cache = CompressedCache(model, SNAPKV)
    cache.layers.append(copy.deepcopy(cache.layers[3]))
    model.model.layers[3].self_attn.layer_idx = 4
    with pytest.raises(UnsupportedModelError, match="4 layers, but got keys of layer 4"):
        call(model, cache, random_ids(1, 70))


def test_concurrent_use_of_one_cache_is_refused_in_second_thread():
    model, ids = tiny_model("llama"), random_ids(1, 40)
    cache, alone = CompressedCache(model, SNAPKV), CompressedCache(model, SNAPKV)
    may_go_on, has_begun = threading.Event(), threading.Event()

    def wait(*_):
        has_begun.set()
        assert may_go_on.wait(60)

    hook = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(wait)
    first = threading.Thread(target=call, args=(model, cache, ids))
    first.start()
    assert has_begun.wait(60)
    hook.remove()
    try:
        with pytest.raises(CacheMismatchError, match="another thread has begun a forward pass"):
            call(model, cache, ids)
    finally:
        may_go_on.set()
        first.join()
    call(model, alone, ids)  # the thread that came first is not disturbed
    assert torch.equal(cache.kept_positions(3), alone.kept_positions(3))


def test_dynamic_cache_can_be_used_between_passes_of_compressed_cache():
    model, ids = tiny_model("llama"), random_ids(1, 70)
    cache = CompressedCache(model, SNAPKV)
    call(model, cache, ids)
    full = DynamicCache(config=model.config)
    call(model, full, ids[:, :50])
    call(model, cache, ids[:, :1])
    assert (full.get_seq_length(), cache.report().chosen_tokens) == (50, 24)
