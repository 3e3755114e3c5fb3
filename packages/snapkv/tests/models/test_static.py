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
    AdaKV,
    CompressedCache,
    InvalidArgumentError,
    PyramidKV,
    SnapKV,
    UnsupportedModelError,
)
from snapkv.kvzip import read_twice
from snapkv.ops import Codes
from snapkv.prefill import layer_by_layer
from snapkv.storage.base import TokenStore
from snapkv.storage.coded import CodedStates
from snapkv.storage.ragged import RaggedStates
from snapkv.storage.static import FixedTail
from tests.families import (
    ONCE,
    call,
    generated,
    peaked_model,
    random_ids,
    tiny_config,
    tiny_model,
)
from tests.methods import COMPRESSING, METHODS

POLICY = SnapKV(40, window_size=8)
FULL = [
    case
    for case in ONCE
    if len(CompressedCache(tiny_model(*case), POLICY).compressed_layers) == 4
    and case[0] != "deepseek_v3"  # latents are refused
]


def static(model, policy=POLICY, room_tokens=32, storage="static", **options):
    return CompressedCache(model, policy, storage=storage, room_tokens=room_tokens, **options)


@pytest.mark.parametrize("quantize", [None, "int8"], ids=["exact", "codes"])
@pytest.mark.parametrize("name", COMPRESSING)
def test_steps_and_crops_are_those_of_dynamic_storage(name, quantize):
    """In a batch of which one row is short; into what heads have kept, where all hold it.

    Codes that are cropped are encoded again, in dynamic storage a step later.
    """
    model, ids, later = tiny_model("llama"), random_ids(2, 90), random_ids(2, 8, 1)
    mask = torch.ones(2, 98, dtype=torch.int64)
    mask[1, :40] = 0
    caches, logits = [], []
    for storage in ("dynamic", "static"):
        cache = static(model, METHODS[name], quantize=quantize, storage=storage)
        if cache.policy.reads_context:
            mask = torch.ones_like(mask)
            read_twice(model, ids, cache)
        else:
            call(model, cache, ids, attention_mask=mask[:, :90])
        steps = [
            call(model, cache, token, attention_mask=mask[:, : 91 + step])
            for step, token in enumerate(later.split(1, dim=1))
        ]
        cache.crop(-14)
        for start, stop in ((84, 90), (90, 98)):
            more = torch.cat([ids, later], dim=1)[:, start:stop]
            steps.append(call(model, cache, more, attention_mask=mask[:, :stop]))
        caches.append(cache)
        logits.append(torch.cat(steps, dim=1))
    wanted, got = logits
    apart = (got - wanted).abs().amax(dim=(0, 2)) / wanted.abs().max()
    assert apart[:8].max() <= 1e-4
    assert apart[8:].max() <= (1e-4 if quantize is None else 5e-3)
    dynamic, fixed = caches
    for layer in dynamic.compressed_layers:
        assert torch.equal(fixed.kept_positions(layer), dynamic.kept_positions(layer))
        fixed.layers[layer].check_integrity()
        held = fixed.layers[layer].store.ragged
        assert held is None or held.room is not None, "in buffers again"


@pytest.mark.parametrize(("family", "implementation"), FULL)
@pytest.mark.parametrize("quantize", [None, "int8"], ids=["exact", "codes"])
def test_every_family_attends_to_heads_in_buffers(family, implementation, quantize):
    model, logits = tiny_model(family, implementation), []
    for storage in ("dynamic", "static"):
        cache = static(model, METHODS["adakv"], quantize=quantize, storage=storage)
        call(model, cache, random_ids(2, 90))
        logits.append([call(model, cache, token) for token in random_ids(2, 3, 1).split(1, dim=1)])
    for got, wanted in zip(*logits, strict=True):
        assert_close(got, wanted, atol=1e-4 * wanted.abs().max(), rtol=0)


def tensors_of(held):
    """All tensors in a store, by their place."""
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, tuple | list):
        for part in held:
            yield from tensors_of(part)
    elif isinstance(held, TokenStore | FixedTail | RaggedStates | CodedStates | Codes):
        for part in vars(held).values():
            yield from tensors_of(part)


@pytest.mark.parametrize("policy", ["snapkv", "adakv"])
@pytest.mark.parametrize("quantize", [None, "int8"], ids=["exact", "codes"])
def test_the_buffers_stay_where_they_are_from_prompt_to_prompt(policy, quantize):
    model = tiny_model("llama")
    cache = static(model, METHODS[policy], quantize=quantize)
    places = set()
    for tokens in (90, 60, 120):
        cache.reset()
        generated(model, cache, random_ids(2, tokens, seed=tokens))
        held = [list(tensors_of(layer.store)) for layer in cache.layers]
        places.add(tuple((part.data_ptr(), part.shape) for each in held for part in each))
    assert len(places) == 1
    copied = copy.deepcopy(cache)
    own = {part.data_ptr() for layer in copied.layers for part in tensors_of(layer.store)}
    assert not own & {place for place, _ in places.pop()}


def test_numbers_of_an_earlier_prompt_are_gone_from_the_buffers():
    """A weight of nothing would not hide what is no number."""
    model, ids = tiny_model("llama"), random_ids(1, 90)
    cache = static(model, METHODS["adakv"])
    call(model, cache, ids)
    for layer in cache.layers:
        for part in tensors_of(layer.store):
            if part.is_floating_point():
                part.fill_(torch.nan)
    cache.reset()
    call(model, cache, random_ids(1, 60))
    assert call(model, cache, random_ids(1, 1)).isfinite().all()


def test_bytes_are_those_of_the_buffers():
    """60 tokens in two blocks, with scales and least numbers of 16 bits; room for 24."""
    model = tiny_model("llama")
    cache = static(model, SnapKV(60, window_size=8), room_tokens=24, quantize="K8V4")
    call(model, cache, random_ids(1, 90))
    store = cache.layers[1].store
    H, D = store.keys.shape[1], store.keys.shape[3]
    keys, values = 64 * H * D + 2 * H * D * 4, 64 * H * D // 2 + 64 * H * 4
    assert store.held_bytes == 2 * 24 * H * D * 4 + keys + values


@pytest.mark.parametrize(
    ("policy", "quantize", "piece"),
    [
        (POLICY, None, None),
        (POLICY, None, 50),
        (POLICY, "int8", None),
        (AdaKV(POLICY), None, None),
        (PyramidKV(40, window_size=8), "int8", None),
    ],
)
def test_one_graph_decodes_every_prompt_of_every_cache(policy, quantize, piece):
    """Also of the next cache, when the last one and what the model carried for it are gone."""
    model = tiny_model.__wrapped__("mistral")
    torch._dynamo.reset()
    counters.clear()
    for lengths in ((90, 20), (120,)):
        cache = static(model, policy, quantize=quantize)
        for tokens in lengths:
            ids = random_ids(2, tokens, seed=tokens)
            cache.reset()
            options = {"compile_config": compiled_on_a_cpu(), "prefill_chunk_size": piece}
            compiled = generated(model, cache, ids, **options)
            eager = static(model, policy, quantize=quantize)
            assert torch.equal(compiled, generated(model, eager, ids, disable_compile=True))
        del cache, eager
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
