"""Codes in static storage: what a step is handed, that nothing moves, and one graph for all."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig

from snapkv import CompressedCache, InvalidArgumentError, KVCodes, SnapKV
from tests.families import ONCE, call, random_ids, tiny_model

POLICY = SnapKV(60, window_size=8)
HOW = KVCodes(8, 4, recent_tokens=5, sink_tokens=2)
STATIC = {"storage": "static", "room_tokens": 24}


FULL = [
    case
    for case in ONCE
    if len(CompressedCache(tiny_model(*case), POLICY).compressed_layers) == 4
    and case[0] != "deepseek_v3"  # latents are refused
]


def read(model, tokens=90, batch=2, **options):
    cache = CompressedCache(model, POLICY, **{"quantize": HOW, **STATIC, **options})
    call(model, cache, random_ids(batch, tokens))
    return cache


def close(got, wanted):
    return bool((got - wanted).abs().max() <= 1e-4 * wanted.abs().max())


@pytest.mark.parametrize(("family", "implementation"), FULL)
@pytest.mark.parametrize("tokens", [90, 40, 6, 3], ids="of {}".format)
def test_a_step_sees_what_codes_of_a_growing_store_stand_for(family, implementation, tokens):
    """Budget, fewer tokens than that, than stay as they came, and than the last of those."""
    model = tiny_model(family, implementation)
    static, grows = read(model, tokens), read(model, tokens, storage="dynamic")
    for depth in range(4):
        for found, wanted in zip(
            static.layers[depth].store.padded(), grows.layers[depth].store.padded(), strict=True
        ):
            assert torch.equal(found, wanted)
    for token in random_ids(2, 4, 1).split(1, dim=1):
        assert close(call(model, static, token), call(model, grows, token))
    assert torch.equal(static.kept_positions(2), grows.kept_positions(2))


def test_bytes_are_those_of_the_buffers():
    """53 tokens in two blocks, with scales and least numbers of 16 bits; 7 and 24 as they came."""
    model = tiny_model("llama")
    store = read(model, batch=1).layers[1].store
    H, D = store.keys.shape[1], store.keys.shape[3]
    keys, values = 64 * H * D + 2 * H * D * 4, 64 * H * D // 2 + 64 * H * 4
    assert store.held_bytes == 2 * (7 + 24) * H * D * 4 + keys + values


def test_there_is_room_for_what_was_asked_and_no_more():
    model, room = tiny_model("llama"), STATIC["room_tokens"]
    for tokens in (90, 20):
        cache = read(model, tokens, batch=1, quantize=KVCodes(8, 8, exact_layers=1))
        call(model, cache, random_ids(1, room))
        before = cache.kept_positions(1)
        with pytest.raises(InvalidArgumentError, match="room_tokens: expected room for"):
            call(model, cache, random_ids(1, 61))
        assert torch.equal(cache.kept_positions(1), before)


def test_buffers_stay_where_they_are_and_one_graph_decodes_every_prompt():
    model = tiny_model.__wrapped__("mistral")
    compile_config = CompileConfig(fullgraph=True, backend="eager", dynamic=False)
    compile_config._compile_all_devices = True
    torch._dynamo.reset()
    counters.clear()
    cache, places = CompressedCache(model, POLICY, quantize=HOW, **STATIC), set()
    for tokens in (90, 20):
        ids = random_ids(2, tokens, seed=tokens)
        cache.reset()
        options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        compiled = model.generate(
            ids, past_key_values=cache, compile_config=compile_config, **options
        )
        eager = CompressedCache(model, POLICY, quantize=HOW, **STATIC)
        plain = model.generate(ids, past_key_values=eager, disable_compile=True, **options)
        assert torch.equal(compiled, plain)
        store = cache.layers[1].store
        held = (store.keys, store.values, store._order, store._codes[0].packed, store.filled)
        places.add(tuple(part.data_ptr() for part in held))
    assert len(places) == 1
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
