"""Reading layer by layer gives what reading at once gives, for every family and storage."""

import pytest
import torch

from snapkv import (
    H2O,
    AdaKV,
    CompressedCache,
    FullCache,
    InvalidArgumentError,
    InvalidTypeError,
    SnapKV,
    UnsupportedModelError,
)
from snapkv.prefill import layer_by_layer
from tests.families import ONCE, random_ids, tiny_model

POLICY = SnapKV(40, window_size=8)


def generated(model, cache, ids, **options):
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False, **options)


def assert_same_cache(cache, expected):
    assert cache.get_seq_length() == expected.get_seq_length()
    for layer in cache.compressed_layers:
        assert torch.equal(cache.kept_positions(layer), expected.kept_positions(layer))
        torch.testing.assert_close(
            cache.layers[layer].keys, expected.layers[layer].keys, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize(
    ("family", "implementation", "chunk_tokens"),
    [(*case, (16, 37)[i % 2]) for i, case in enumerate(ONCE)],
)
def test_reads_what_is_read_at_once(family, implementation, chunk_tokens):
    model, ids = tiny_model(family, implementation), random_ids(2, 100)
    cache, expected = CompressedCache(model, POLICY), CompressedCache(model, POLICY)
    with torch.no_grad():
        at_once = model(ids, past_key_values=expected, logits_to_keep=1).logits
        with layer_by_layer(model, chunk_tokens=chunk_tokens):
            logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    torch.testing.assert_close(logits, at_once, atol=1e-4, rtol=1e-4)
    assert_same_cache(cache, expected)


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(FullCache(), id="full"),
        pytest.param(H2O(40), id="h2o"),
        pytest.param(AdaKV(POLICY), id="adakv"),
    ],
)
def test_generates_the_same_with_every_kind_of_policy(policy):
    model, ids = tiny_model("qwen3"), random_ids(1, 90)
    expected = generated(model, CompressedCache(model, policy), ids)
    with layer_by_layer(model, chunk_tokens=32):
        assert torch.equal(generated(model, CompressedCache(model, policy), ids), expected)


def test_static_storage_padding_and_beams():
    model, ids = tiny_model("llama"), random_ids(2, 90)
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    ids = ids.masked_fill(mask == 0, 0)
    expected = generated(model, CompressedCache(model, POLICY), ids, attention_mask=mask)
    static = CompressedCache(model, POLICY, storage="static", room_tokens=16)
    with layer_by_layer(model, chunk_tokens=25):
        assert torch.equal(generated(model, static, ids, attention_mask=mask), expected)
    beams = generated(model, CompressedCache(model, POLICY), ids[1:], num_beams=3)
    with layer_by_layer(model, chunk_tokens=25):
        cache = CompressedCache(model, POLICY)
        assert torch.equal(generated(model, cache, ids[1:], num_beams=3), beams)


def test_only_the_layer_being_read_is_whole():
    model, ids, whole = tiny_model("mistral"), random_ids(1, 100), []

    class Watched(CompressedCache):
        def update(self, *args, **kwargs):
            states = super().update(*args, **kwargs)
            whole.append(sum(layer.store.slots > 40 for layer in self.layers))
            return states

    with torch.no_grad(), layer_by_layer(model, chunk_tokens=20):
        model(ids, past_key_values=Watched(model, POLICY))
    assert max(whole) == 1
    assert len(whole) == 5 * len(model.model.layers)


def test_the_model_is_as_before_afterwards_and_after_an_error():
    model, ids = tiny_model("llama"), random_ids(1, 60)
    cache = CompressedCache(model, POLICY)
    with pytest.raises(RuntimeError, match="stop"), layer_by_layer(model, chunk_tokens=16):
        raise RuntimeError("stop")
    assert not any("forward" in vars(module) for module in model.modules())
    with torch.no_grad(), layer_by_layer(model, chunk_tokens=16):
        plain = model(ids).logits  # without a compressed cache: as ever
        model(ids, past_key_values=cache)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain)
    assert cache.report().kept_tokens == 40


def test_what_cannot_be_read_layer_by_layer_is_refused():
    model = tiny_model("llama")
    with (
        pytest.raises(InvalidArgumentError, match="chunk_tokens"),
        layer_by_layer(model, chunk_tokens=0),
    ):
        pass
    with (
        pytest.raises(InvalidTypeError, match="chunk_tokens"),
        layer_by_layer(model, chunk_tokens=1.5),
    ):
        pass
    with (
        pytest.raises(UnsupportedModelError, match="wrapped already"),
        layer_by_layer(model),
        layer_by_layer(model),
    ):
        pass
    assert not any("forward" in vars(module) for module in model.modules())
