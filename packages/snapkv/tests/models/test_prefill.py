"""`layer_by_layer` reads a prompt with the result of a single pass and restores the model."""

import copy

import pytest
import torch

from snapkv import CompressedCache, InvalidArgumentError, SnapKV
from snapkv.errors import OutOfMemoryError, UnsupportedModelError
from snapkv.prefill import layer_by_layer
from tests.families import generated, random_ids, tiny_model

POLICY = SnapKV(40, window_size=8)


def test_only_one_layer_is_uncompressed_while_reading_layer_by_layer():
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


def test_layer_by_layer_restores_model_on_exit_and_after_error():
    model, ids = tiny_model("llama"), random_ids(1, 60)
    expected = model(ids).logits
    with pytest.raises(RuntimeError, match="stop"), layer_by_layer(model):
        raise RuntimeError("stop")
    with layer_by_layer(model, chunk_tokens=16):
        assert torch.equal(model(ids).logits, expected)  # without a compressed cache
        with pytest.raises(UnsupportedModelError, match="already wrapped"), layer_by_layer(model):
            pass
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(ids).logits, expected)


def test_layer_by_layer_does_not_overwrite_input_embeddings():
    model, ids = tiny_model("llama"), random_ids(1, 60)
    embeddings = model.get_input_embeddings()(ids).detach()
    before = embeddings.clone()
    with layer_by_layer(model, chunk_tokens=16), torch.no_grad():
        cache = CompressedCache(model, POLICY)
        logits = model(inputs_embeds=embeddings, past_key_values=cache).logits
        of_ids = model(ids, past_key_values=CompressedCache(model, POLICY)).logits
    assert torch.equal(embeddings, before)
    assert torch.equal(logits, of_ids)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_layer_by_layer_refuses_hidden_states_and_attention_weights(name):
    model, ids = tiny_model("llama", "eager"), random_ids(1, 60)
    cache = CompressedCache(model, POLICY)
    with layer_by_layer(model, chunk_tokens=16), torch.no_grad():
        with pytest.raises(
            InvalidArgumentError, match=f"{name}: the prompt is read layer by layer"
        ):
            model(ids, past_key_values=cache, **{name: True})
        model(ids[:, :16], past_key_values=cache, **{name: True})


def test_layer_by_layer_refuses_chunks_of_zero_tokens():
    refused = pytest.raises(InvalidArgumentError, match="chunk_tokens")
    with refused, layer_by_layer(tiny_model("llama"), chunk_tokens=0):
        pass


def test_out_of_memory_during_prefill_leaves_model_and_cache_usable():
    model, ids = copy.deepcopy(tiny_model("llama")), random_ids(1, 150)
    mlp, calls = model.model.layers[2].mlp, []
    cache = CompressedCache(model, POLICY)

    def full(module, arguments):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with layer_by_layer(model, chunk_tokens=24):
        expected = generated(model, CompressedCache(model, POLICY), ids)
    hook = mlp.register_forward_pre_hook(full)
    with (
        pytest.raises(
            OutOfMemoryError,
            match=r"150 tokens do not fit in .* Pass chunk_tokens=12 to layer_by_layer",
        ),
        layer_by_layer(model, chunk_tokens=24),
    ):
        generated(model, cache, ids)
    hook.remove()
    assert cache.get_seq_length() == 0
    with layer_by_layer(model, chunk_tokens=24):
        assert torch.equal(generated(model, cache, ids), expected)
