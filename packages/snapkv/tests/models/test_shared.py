"""One reading fills several caches; each cache is as if the model had read the prompt into it."""

import pytest
import torch

from snapkv import CompressedCache, KVzip
from snapkv.errors import UnsupportedModelError
from snapkv.kvzip import read_context
from snapkv.prefill import SharedReading
from snapkv.prefill.shared import shared_bytes
from tests.families import generated, random_ids, small_model, tiny_model
from tests.methods import METHODS, SNAPKV

OPTIONS = {
    "int8": {"quantize": "int8"},
    "recall": {"recall": "host"},
    "compress": {"turns": "compress"},
    "protect": {"protect": [(2, 9)]},
}


def answered(model, ids, cache):
    told = {"output_logits": True, "return_dict_in_generate": True}
    output = generated(model, cache, ids, max_new_tokens=4, **told)
    return output.sequences, torch.stack(output.logits)


def assert_stored_alike(given, own):
    for layer in own.compressed_layers:
        assert torch.equal(given.kept_positions(layer), own.kept_positions(layer))
        assert given.layers[layer].store.held_bytes == own.layers[layer].store.held_bytes


def assert_alike(model, ids, shared, policy, **options):
    own, given = (CompressedCache(model, policy, **options) for _ in range(2))
    expected, expected_logits = answered(model, ids, own)
    with shared.given():
        found, logits = answered(model, ids, given)
    assert torch.equal(found, expected)
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-5)
    assert_stored_alike(given, own)


def test_policies_with_shared_reading_match_policies_with_own_reading():
    model, ids = tiny_model("llama"), random_ids(1, 90)
    shared = SharedReading(model, ids)
    for name in ("adakv", "criticalkv", "h2o", "fastgen", "kvzap", "across-layers"):
        assert_alike(model, ids, shared, METHODS[name])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_kind_of_cache_with_shared_reading_matches_own_reading(options):
    model, ids = tiny_model("llama"), random_ids(1, 80)
    shared = SharedReading(model, ids)
    for _ in range(2):  # nothing of what is shared was written over
        assert_alike(model, ids, shared, SNAPKV, **options)


def test_question_after_shared_context_is_read_by_the_model():
    model, ids = tiny_model("llama"), random_ids(1, 100)
    shared = SharedReading(model, ids[:, :80])
    own, given = (CompressedCache(model, SNAPKV) for _ in range(2))
    with torch.no_grad():
        model(ids[:, :80], past_key_values=own)
        with shared.given():
            model(ids[:, :80], past_key_values=given)
            assert torch.equal(answered(model, ids, given)[0], answered(model, ids, own)[0])


def test_shared_reading_leaves_losses_and_tuples_to_the_model():
    model, ids = tiny_model("llama"), random_ids(1, 40)
    with SharedReading(model, ids).given():
        cache = CompressedCache(model, SNAPKV)
        output = model(ids, past_key_values=cache, labels=ids)
        assert output.loss.item() == model(ids, labels=ids).loss.item()
        cache = CompressedCache(model, SNAPKV)
        assert isinstance(model(ids, past_key_values=cache, return_dict=False), tuple)


def test_kvzip_with_shared_first_reading_keeps_same_positions_as_alone():
    model, ids = tiny_model("llama"), random_ids(1, 80)
    policy = KVzip(24, window_size=6, chunk_tokens=32)
    own = read_context(model, ids, policy)
    with SharedReading(model, ids).given():
        assert_stored_alike(read_context(model, ids, policy), own)


def test_shared_reading_refuses_already_wrapped_model(monkeypatch):
    model, ids = tiny_model("llama"), random_ids(1, 40)
    shared = SharedReading(model, ids)
    refused = pytest.raises(UnsupportedModelError, match="are already wrapped")
    with shared.given(), refused, shared.given():
        pass
    monkeypatch.setitem(vars(model), "forward", model.forward)  # as libraries lay hooks around it
    with refused:
        SharedReading(model, ids)


def test_shared_reading_refuses_model_with_recurrent_layers():
    with pytest.raises(UnsupportedModelError, match=r"2 of 3 in .* Read the prompt for each"):
        SharedReading(small_model("linear"), random_ids(1, 40) % 64)


def test_call_with_mask_positions_or_hidden_states_is_read_by_the_model():
    model, ids = tiny_model.__wrapped__("llama"), random_ids(1, 40)  # it gets transformers' hooks
    mask = torch.ones_like(ids)
    mask[0, :5] = 0

    def read(**asked):
        return model(ids, past_key_values=CompressedCache(model, SNAPKV), **asked)

    with torch.no_grad():
        expected = read(attention_mask=mask).logits[:, -1]
        spread = 2 * torch.arange(ids.shape[1])[None]
        apart = read(position_ids=spread).logits[:, -1]
        with SharedReading(model, ids).given():
            assert read(output_hidden_states=True).hidden_states
            assert torch.equal(read(attention_mask=mask).logits[:, -1], expected)
            assert torch.equal(read(position_ids=spread).logits[:, -1], apart)
            assert not torch.equal(read().logits[:, -1], expected)


def test_shared_bytes_predicts_size_of_shared_reading():
    """64 tokens, 4 layers, 8 query heads and 2 KV heads of keys and values, 8 floats of 4 bytes."""
    model = tiny_model("llama")
    shared = SharedReading(model, random_ids(1, 64))
    states = [part for step in shared._steps for part in (step.keys, step.values, step.call.query)]
    held = sum(part.nbytes for part in states)
    assert held == shared_bytes(model, 64) == 64 * 4 * (8 + 4) * 8 * 4
