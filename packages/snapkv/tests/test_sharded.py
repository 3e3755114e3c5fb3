"""Models that accelerate spreads over two pretended devices, or offloads, give the same tokens.

The tokens of each layer and all state about them stay on the device of the layer.
"""

import copy

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from torch.utils._pytree import tree_leaves

from snapkv import AdaKV, CompressedCache, KeyDiff, KVzip, SnapKV, UnsupportedModelError, prefill
from snapkv.hf.placement import layer_devices
from snapkv.kvzip import read_context
from snapkv_lab.medusa import CandidateTree, Medusa
from tests.families import KINDS, random_ids, small_model, tiny_model
from tests.lab.medusa.heads import random_heads
from tests.methods import BOTH, CACHES, SNAPKV
from tests.pretended import device, pretending

pytestmark = pytest.mark.devices
IDS = random_ids(2, 64) % 64
MASK = torch.ones_like(IDS)
MASK[1, :9] = 0
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
BYTES = {"bytes": (AdaKV(SnapKV("6KiB", window_size=4)), {})}


def new_cache(model, name):
    policy, options = (CACHES | BYTES)[name]
    return CompressedCache(model, policy, **options)


def generated(model, put, name="snapkv", ids=IDS, **options):
    cache = new_cache(model, name)
    return model.generate(put(ids), past_key_values=cache, **OPTIONS, **options)


MIXED = {
    "sum": lambda here, there: there + here,
    "index of the host": lambda here, there: here[there.long()],
    "values put from the host": lambda here, there: there.index_put_((there.long(),), here),
    "joined numbers": lambda here, there: torch.stack([there.sum(), here.sum()]),
}


@pytest.mark.parametrize("mix", MIXED.values(), ids=MIXED)
def test_operation_on_tensors_of_two_pretended_devices_fails(mix):
    with pretending() as there, pytest.raises(RuntimeError, match="all tensors on one device"):
        mix(torch.ones(3), torch.ones(3, device=there))


def spread(model, first, second, split):
    """Put the layers from `split` on and the last norm on the second device, the rest on the first.

    The output projection stays with the embedding, because they may share weights.
    """
    base, decoder = model.base_model_prefix, model.get_decoder()
    places = {name: first for name, _ in model.named_children() if name != base}
    for name, part in decoder.named_children():
        if name == "layers":
            places |= {f"{base}.layers.{i}": (first, second)[i >= split] for i in range(len(part))}
        else:
            places[f"{base}.{name}"] = second if name == "norm" else first
    skip = model._skip_keys_device_placement
    return dispatch_model(model, places, main_device=first, skip_keys=skip)


def require_in_place(cache):
    """Check that everything a cache layer holds is on the device of the model's layer."""
    devices = layer_devices(cache.model)
    assert len(set(devices.values())) == 2
    for index, layer in enumerate(cache.layers):
        held = [vars(layer)]
        if index in cache.compressed_layers:
            parts = (getattr(layer, name).state() for name in ("store", "slots", "state"))
            held = [vars(part) if hasattr(part, "__dict__") else part for part in parts]
            held += [layer.queries.held, layer.keys, layer.values, layer.other_states]
        found = {each.device for each in tree_leaves(held) if isinstance(each, torch.Tensor)}
        assert found == {devices[index]}


@pytest.fixture
def require_same():
    """Return a check that `run` gives equal results on the CPU and spread over two devices."""

    def require(run, model=None, split=None):
        here = tiny_model("llama") if model is None else model
        expected = run(here, lambda tensor: tensor)
        split = len(here.get_decoder().layers) // 2 if split is None else split
        with pretending() as first:
            there = spread(copy.deepcopy(here), first, device(1), split)
            got = run(there, lambda tensor: tensor.to(first))
            assert got.device == first
        torch.testing.assert_close(got.cpu(), expected)

    return require


@pytest.mark.parametrize("name", [*CACHES, *BYTES])
def test_sharded_model_gives_same_tokens_for_every_method_and_storage(name, require_same):
    def run(model, put):
        cache = new_cache(model, name)
        text = model.generate(put(IDS), attention_mask=put(MASK), past_key_values=cache, **OPTIONS)
        if put(IDS).device != IDS.device:
            require_in_place(cache)
        return text

    require_same(run)


@pytest.mark.parametrize("name", ["snapkv", "adakv"])
@pytest.mark.parametrize("kind", KINDS)
def test_sharded_model_gives_same_tokens_for_every_kind_of_layer(kind, name, require_same):
    split = 2 if kind == "shared" else None  # the layers that share keys lie behind
    require_same(lambda model, put: generated(model, put, name, IDS), small_model(kind), split)


def test_layers_that_share_keys_must_be_on_one_device():
    with pretending() as first:
        model = spread(copy.deepcopy(small_model("shared")), first, device(1), 3)
        with pytest.raises(
            UnsupportedModelError, match="to put the layers 2 to 3 on the same device"
        ):
            CompressedCache(model, SNAPKV)


@pytest.mark.parametrize("name", ["snapkv", "adakv", "int4", "h2o", "recall"])
def test_sharded_model_gives_same_tokens_after_crop_and_load(name, require_same, tmp_path):
    def run(model, put):
        cache, path = new_cache(model, name), tmp_path / model.device.type
        text = model.generate(put(IDS), past_key_values=cache, **OPTIONS)
        cache.reorder_cache(put(torch.tensor([1, 0])))
        text = torch.cat([text.flip(0), put(IDS[:, :7])], dim=1)
        if name != "h2o":
            cache.crop(-2)
        cache.save(path)
        loaded = CompressedCache.load(path, model)
        text = model.generate(text, past_key_values=loaded, **OPTIONS)
        if put(IDS).device != IDS.device:
            require_in_place(loaded)
        return text

    require_same(run)


def spans(model, put):
    cache = CompressedCache(model, KeyDiff(**BOTH), protect=[(50, 60)])
    text = model.generate(put(IDS), past_key_values=cache, **OPTIONS)
    cache.drop([(3, 9)])
    asked = torch.cat([text, put(IDS[:, :7])], dim=1)
    return model.generate(asked, past_key_values=cache, **OPTIONS)


def by_layer(model, put):
    return within(prefill.layer_by_layer(model, chunk_tokens=16), model, put)


def within(reading, model, put):
    before = [vars(module).get("forward") for module in model.modules()]
    with reading:
        text = generated(model, put)
    assert [vars(module).get("forward") for module in model.modules()] == before
    return text


def drafts(model, put):
    tree = CandidateTree.likeliest([(0.3, 0.3)] * 3, 12)
    heads = Medusa(random_heads(model), tree)
    return generated(model, put, "snapkv", IDS[:1], custom_generate=heads)


def second_reading(model, put):
    cache = read_context(model, put(IDS), AdaKV(KVzip(**BOTH)), instruction_ids=(7, 8))
    asked = torch.cat([put(IDS), put(IDS[:, :5])], dim=1)
    return model.generate(asked, past_key_values=cache, **OPTIONS)


@pytest.mark.parametrize("way", [spans, by_layer, drafts, second_reading])
def test_sharded_model_gives_same_tokens_with_spans_layerwise_drafts_and_kvzip(way, require_same):
    require_same(way)


@pytest.mark.parametrize(
    "name", ["snapkv", "criticalkv", "expected-attention", "streaming-llm moved", "adakv"]
)
def test_model_with_offloaded_weights_gives_same_tokens(name, tmp_path):
    def run(model):
        cache = new_cache(model, name)
        text = model.generate(IDS, past_key_values=cache, **OPTIONS)
        cache.save(tmp_path / "cache")
        loaded = CompressedCache.load(tmp_path / "cache", model)
        return model.generate(text, past_key_values=loaded, **OPTIONS)

    here = tiny_model("llama")
    offloaded = cpu_offload(copy.deepcopy(here), torch.device("cpu"))
    assert offloaded.device.type == "meta"
    assert torch.equal(run(offloaded), run(here))
