"""Static storage: the same answers from buffers that never move, and one graph for all prompts.

That every family answers from it is in `test_masked`.
"""

import copy
import gc

import pytest
import torch
from torch._dynamo.utils import counters
from torch.testing import assert_close
from transformers import CompileConfig

from snapkv import (
    CompressedCache,
    InvalidArgumentError,
    SnapKV,
    UnsupportedModelError,
)
from snapkv.prefill import layer_by_layer
from tests.families import peaked_model, random_ids, tiny_config, tiny_model

POLICY = SnapKV(40, window_size=8)


def static(model, policy=POLICY, room_tokens=32):
    return CompressedCache(model, policy, storage="static", room_tokens=room_tokens)


def generated(model, cache, ids, **options):
    options = {"attention_mask": torch.ones_like(ids), **options}
    return model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False, **options)


def test_tokens_are_taken_back_as_with_dynamic_storage():
    model, ids, logits = tiny_model("qwen3"), random_ids(2, 96), []
    for storage in ("dynamic", "static"):
        cache = CompressedCache(model, POLICY, storage=storage)
        with torch.no_grad():
            for start, stop in ((0, 90), (90, 96)):
                model(ids[:, start:stop], past_key_values=cache)
            cache.crop(-4)
            logits.append(model(ids[:, 92:], past_key_values=cache).logits)
    assert_close(*logits)


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


@pytest.mark.parametrize("piece", [None, 50])
def test_one_graph_decodes_every_prompt_of_every_cache(piece):
    """Also of the next cache, when the last one and what the model carried for it are gone."""
    model, policy = tiny_model.__wrapped__("mistral"), SnapKV(36, window_size=8)
    torch._dynamo.reset()
    counters.clear()
    for lengths in ((90, 20), (120,)):
        cache = static(model, policy)
        for tokens in lengths:
            ids = random_ids(2, tokens, seed=tokens)
            cache.reset()
            options = {"compile_config": compiled_on_a_cpu(), "prefill_chunk_size": piece}
            compiled = generated(model, cache, ids, **options)
            assert torch.equal(compiled, generated(model, CompressedCache(model, policy), ids))
        del cache
        gc.collect()
        assert model.config._attn_implementation == "sdpa"
    of_each_cache = 2 if torch.__version__ < "2.11" else 1  # older ones look at what a cache is
    assert counters["stats"]["unique_graphs"] == of_each_cache
    assert not counters["graph_break"]


def compiled_on_a_cpu(**options):
    """As `generate` compiles on a GPU by itself, which it does not on a CPU."""
    config = CompileConfig(backend="eager", dynamic=False, **options)
    config._compile_all_devices = True
    return config


def test_the_steps_of_forty_layers_are_one_graph():
    """More than torch compiles variants of: were every layer one, the rest would run eagerly."""
    config, ids = copy.deepcopy(tiny_config("llama")), random_ids(1, 60)
    config.num_hidden_layers = 40
    model = peaked_model(config, "sdpa")
    torch._dynamo.reset()
    counters.clear()
    compiled = generated(model, static(model), ids, compile_config=compiled_on_a_cpu())
    assert model._last_compile_config.fullgraph, "where a graph breaks, that is an error"
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert torch.equal(compiled, generated(model, CompressedCache(model, POLICY), ids))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
def test_compiled_code_decodes_what_eager_code_does():
    model, ids = tiny_model("llama"), random_ids(1, 90)
    compile_config = CompileConfig(fullgraph=True, mode="default", dynamic=False)
    compile_config._compile_all_devices = True
    expected = generated(model, CompressedCache(model, POLICY), ids)
    compiled = generated(model, static(model), ids, compile_config=compile_config)
    assert torch.equal(compiled, expected)


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
    for new_tokens in (4, 8):  # behind a turn, and more than there ever is
        with pytest.raises(InvalidArgumentError, match="room_tokens"):
            model.generate(random_ids(1, 62), past_key_values=cache, max_new_tokens=new_tokens)
    assert [layer.seen_tokens for layer in cache.layers] == [60] * len(cache.layers)
    answer = model.generate(random_ids(1, 62), past_key_values=cache, max_length=65)
    assert answer.shape[1] == 65


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
def test_a_compiled_model_and_a_cache_that_grows_are_refused():
    """Before anything is stored."""
    model = tiny_model("llama")
    cache = CompressedCache(model, POLICY)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), pytest.raises(UnsupportedModelError, match=r"torch\.compile has"):
        compiled(random_ids(1, 60), past_key_values=cache)
    assert cache.get_seq_length() == 0
    torch.compiler.reset()
