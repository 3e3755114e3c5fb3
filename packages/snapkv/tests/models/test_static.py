"""Static storage: the same answers from buffers that never move, and one graph for all prompts."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters
from torch.testing import assert_close
from transformers import CompileConfig

from snapkv import (
    H2O,
    AdaKV,
    CompressedCache,
    FullCache,
    InvalidArgumentError,
    PyramidKV,
    SnapKV,
    UnsupportedModelError,
)
from snapkv.prefill import layer_by_layer
from tests.families import ONCE, random_ids, tiny_model

POLICY = SnapKV(40, window_size=8)
HYBRID = ("cohere2", "gemma2", "gemma3_text", "gpt_oss")
FULL = [case for case in ONCE if case[0] not in HYBRID]
NEW_TOKENS = 12


def static(model, policy=POLICY, room_tokens=32):
    return CompressedCache(model, policy, storage="static", room_tokens=room_tokens)


def generated(model, cache, ids, **options):
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(
        ids, past_key_values=cache, max_new_tokens=NEW_TOKENS, do_sample=False, **options
    )


@pytest.mark.parametrize(("family", "implementation"), FULL)
def test_generates_what_dynamic_storage_generates(family, implementation):
    model, ids = tiny_model(family, implementation), random_ids(2, 90)
    cache, expected = static(model), CompressedCache(model, POLICY)
    assert torch.equal(generated(model, cache, ids), generated(model, expected, ids))
    for layer in cache.compressed_layers:
        assert torch.equal(cache.kept_positions(layer), expected.kept_positions(layer))
    assert cache.report().kept_tokens == expected.report().kept_tokens
    assert cache.get_seq_length() == expected.get_seq_length() == 90 + NEW_TOKENS - 1


def test_padded_rows_generate_what_they_do_with_dynamic_storage():
    model, ids = tiny_model("llama"), random_ids(3, 70)
    mask = torch.ones_like(ids)
    mask[0, :50], mask[1, :10] = 0, 0
    ids = ids.masked_fill(mask == 0, 0)
    for policy in (POLICY, SnapKV(65, window_size=8)):
        expected = generated(model, CompressedCache(model, policy), ids, attention_mask=mask)
        assert torch.equal(
            generated(model, static(model, policy), ids, attention_mask=mask), expected
        )


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_beams": 3}, id="beams"),
        pytest.param({"num_return_sequences": 2, "num_beams": 2}, id="several sequences"),
        pytest.param({"prefill_chunk_size": 32}, id="chunks"),
    ],
)
def test_ways_to_generate(options):
    model, ids = tiny_model("llama"), random_ids(1, 80)
    expected = generated(model, CompressedCache(model, POLICY), ids, **options)
    assert torch.equal(generated(model, static(model), ids, **options), expected)


def test_plain_calls_one_by_one_and_together():
    model, ids = tiny_model("qwen3"), random_ids(2, 96)
    together, single, expected = static(model), static(model), CompressedCache(model, POLICY)
    with torch.no_grad():
        for cache in (together, single, expected):
            model(ids[:, :90], past_key_values=cache)
        logits = model(ids[:, 90:], past_key_values=expected).logits
        torch.testing.assert_close(model(ids[:, 90:], past_key_values=together).logits, logits)
        for i in range(90, 96):
            one = model(ids[:, i : i + 1], past_key_values=single).logits
            torch.testing.assert_close(one[:, 0], logits[:, i - 90])
        together.crop(-4)
        again = model(ids[:, 92:], past_key_values=together).logits
    torch.testing.assert_close(again, logits[:, 2:])


def test_the_buffers_stay_where_they_are_from_prompt_to_prompt():
    model = tiny_model("llama")
    cache = static(model)
    places = set()
    for tokens in (90, 20, 120):
        cache.reset()
        generated(model, cache, random_ids(2, tokens, seed=tokens))
        places.add(tuple(layer.keys.data_ptr() for layer in cache.layers))
        assert cache.layers[0].keys.shape[2] == 40 + 32
    assert len(places) == 1
    copied = copy.deepcopy(cache)
    assert copied.layers[0].keys.data_ptr() not in {place[0] for place in places}


def test_a_prompt_read_in_inference_mode_can_be_continued_outside_of_it():
    model, ids = tiny_model("llama"), random_ids(1, 60)
    cache, expected = static(model), CompressedCache(model, POLICY)
    for each in (cache, expected):
        with torch.inference_mode():
            model(ids[:, :59], past_key_values=each)
    with torch.no_grad():
        logits = model(ids[:, 59:], past_key_values=cache).logits
        torch.testing.assert_close(logits, model(ids[:, 59:], past_key_values=expected).logits)


def test_one_graph_decodes_every_prompt():
    model, policy = tiny_model("mistral"), SnapKV(36, window_size=8)
    compile_config = CompileConfig(fullgraph=True, backend="eager", dynamic=False)
    compile_config._compile_all_devices = True
    cache = static(model, policy)
    torch._dynamo.reset()
    counters.clear()
    for tokens in (90, 20, 120):
        ids = random_ids(2, tokens, seed=tokens)
        cache.reset()
        compiled = generated(model, cache, ids, compile_config=compile_config)
        assert torch.equal(compiled, generated(model, CompressedCache(model, policy), ids))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
def test_compiled_code_decodes_what_eager_code_does():
    model, ids = tiny_model("llama"), random_ids(1, 90)
    compile_config = CompileConfig(fullgraph=True, mode="default", dynamic=False)
    compile_config._compile_all_devices = True
    expected = generated(model, CompressedCache(model, POLICY), ids)
    assert torch.equal(
        generated(model, static(model), ids, compile_config=compile_config), expected
    )


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(FullCache(), id="no budget"),
        pytest.param(H2O(40), id="evicts"),
        pytest.param(SnapKV(keep_ratio=0.5), id="ratio"),
        pytest.param(AdaKV(SnapKV(40)), id="ragged"),
        pytest.param(PyramidKV(40), id="other numbers in other layers"),
    ],
)
def test_policies_without_one_budget_for_all_are_refused(policy):
    with pytest.raises(InvalidArgumentError, match=r"storage: expected a policy that keeps a budg"):
        static(tiny_model("llama"), policy)


def test_what_static_storage_cannot_hold_is_refused():
    model = tiny_model("llama")
    with pytest.raises(
        InvalidArgumentError, match=r"max_new_tokens: expected at most room_tokens=8"
    ):
        generated(model, static(model, room_tokens=8), random_ids(1, 60))
    with pytest.raises(InvalidArgumentError, match="storage"):
        CompressedCache(model, POLICY, storage="statical")
    grouped = SnapKV(40, window_size=8, group_reduce="none")
    with pytest.raises(InvalidArgumentError, match="one set per KV head"):
        static(model, grouped)
    with pytest.raises(UnsupportedModelError, match="full attention only"):
        static(tiny_model("cohere2"))


def test_what_is_beyond_the_room_is_refused_before_anything_is_stored():
    model = tiny_model("llama")
    cache = static(model, room_tokens=4)
    with torch.no_grad():
        model(random_ids(1, 60), past_key_values=cache)
        with pytest.raises(InvalidArgumentError, match="room_tokens"):
            model(random_ids(1, 5), past_key_values=cache)
        with (
            pytest.raises(InvalidArgumentError, match="room_tokens"),
            layer_by_layer(model, chunk_tokens=1),
        ):
            model(random_ids(1, 5), past_key_values=cache)
    with pytest.raises(InvalidArgumentError, match="room for 45 tokens, got a buffer of 44"):
        cache.expect_prompt(65)
    with pytest.raises(InvalidArgumentError, match="room_tokens"):
        model.generate(random_ids(1, 62), past_key_values=cache, max_new_tokens=4)
    assert [layer.seen_tokens for layer in cache.layers] == [60] * len(cache.layers)
    answer = model.generate(random_ids(1, 62), past_key_values=cache, max_new_tokens=3)
    assert answer.shape[1] == 65


@pytest.mark.parametrize("tokens", [2, 12], ids=["whole", "recalled"])
def test_what_is_taken_back_with_recall_is_as_with_dynamic_storage(tokens):
    """Beyond the tokens that are still whole, all that was seen comes back first."""
    model, ids, more = tiny_model("llama"), random_ids(1, 90), random_ids(1, 9, seed=1)
    logits = []
    for storage in ("dynamic", "static"):
        cache = CompressedCache(model, POLICY, storage=storage, recall="host")
        with torch.no_grad():
            model(ids, past_key_values=cache)
            model(more, past_key_values=cache)
            cache.crop(-tokens)
            logits.append(model(more[:, :4], past_key_values=cache).logits)
        assert cache.get_seq_length() == 90 + 9 - tokens + 4
    assert_close(*logits)
