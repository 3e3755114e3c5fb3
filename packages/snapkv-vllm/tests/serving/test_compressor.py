"""Votes and moves on tensors equal those of the library's cache; no vLLM is needed."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from snapkv import TOVA, CompressedCache, SnapKV, StreamingLLM
from snapkv.errors import UnsupportedModelError
from snapkv.ops import ScoreOptions
from snapkv.policies import PromptLayer
from snapkv_vllm import layers as layers_module
from snapkv_vllm.admission.plans import Move, PromptPlan
from snapkv_vllm.compressor import Compressor, QueryRecorder
from snapkv_vllm.layouts import make_layout, slot_numbers
from tests.families import random_ids, tiny_model

BLOCK = 16
NOTHING = {True: float("nan"), False: 255}


class Backend:
    @staticmethod
    def get_name():
        return "FLASH_ATTN"


def engine_layer(
    heads, kv_heads, head_size, blocks=32, block_tokens=BLOCK, dtype=torch.float32, **more
):
    """What vLLM has of a layer: an implementation that is called, and a cache of blocks."""
    impl = SimpleNamespace(scale=head_size**-0.5, forward=lambda layer, query, *_: query, **more)
    return SimpleNamespace(
        impl=impl,
        num_heads=heads,
        head_size=head_size,
        kv_cache=torch.full(
            (blocks, kv_heads, block_tokens, 2 * head_size),
            NOTHING[dtype.is_floating_point],
            dtype=dtype,
        ),
        get_attn_backend=lambda: Backend,
    )


@pytest.fixture(scope="module")
def prompt():
    """A prompt of 150 tokens as a model's layers see it: queries, keys, values of every layer."""
    model = tiny_model("llama")
    ids = random_ids(1, 150)
    seen = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def listen(query, key, value, **options):
        seen.append((query.detach().clone(), key.detach().clone(), value.detach().clone()))
        return attend(query, key, value, **options)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", listen)
        model(ids)
    kv_heads = model.config.num_key_value_heads
    group = seen[0][0].shape[1] // kv_heads
    states = [
        (
            q[0],
            k[0] if k.shape[1] == kv_heads else k[0, ::group],
            v[0, ::group] if v.shape[1] != kv_heads else v[0],
        )
        for q, k, v in seen
    ]
    return model, ids, states


def fill(layer, blocks, keys, values):
    """Put a layer's (Hkv, T, D) states into these blocks."""
    places = slot_numbers(torch.tensor(blocks), keys.shape[1], BLOCK)
    make_layout([layer]).write(places, keys[None], values[None])


def compressor_of(layers, block_tokens=BLOCK):
    compressor = Compressor({0: layers}, QueryRecorder(), device=torch.device("cpu"))
    compressor.bind_caches({0: block_tokens})
    return compressor


def move(sources, targets):
    return (Move(group=0, sources=tuple(sources), targets=tuple(targets)),)


def run(states, policy, chunks, blocks, target_blocks=None, dtype=torch.float32, layers=None):
    """All of a prompt in chunks through a compressor; returns its layers."""
    q, k, _ = states[0]
    layers = layers or {
        f"layer.{i}": engine_layer(q.shape[0], k.shape[0], q.shape[-1], dtype=dtype)
        for i in range(len(states))
    }
    compressor = compressor_of(layers)
    recorder = compressor._recorder
    for layer, (_, keys, values) in zip(layers.values(), states, strict=True):
        fill(layer, blocks, keys, values)
    computed, length = 0, k.shape[1]
    for step in chunks:
        plan = PromptPlan(prompt_tokens=length, policy=policy)
        order = plan.make_order(computed, computed, step)
        computed += step
        if order is None:
            continue
        targets = target_blocks or blocks[: -(-order.kept_tokens // BLOCK)]
        order = replace(order, moves=move(blocks, targets) if order.is_due else ())
        rows = slice(step - order.query_tokens, step)
        recorder.rows_of_requests = {"a": rows} if order.query_tokens else {}
        for layer, (queries, _, _) in zip(layers.values(), states, strict=True):
            layer.impl.forward(layer, queries[:, computed - step : computed].transpose(0, 1))
        compressor.compress({"a": order})
    assert not recorder.recorded
    return list(layers.values())


@pytest.mark.parametrize(
    ("policy", "chunks", "target_blocks"),
    [
        (SnapKV(48), [150], None),
        (SnapKV(48), [140, 1, 9], (31, 4, 17)),
        (SnapKV(40, window_size=16, pooling="avg", group_reduce="max"), [100, 45, 5], (31, 4, 17)),
        (SnapKV(40, window_size=16, voters=200), [140, 1, 9], None),  # more than the prompt has
        (TOVA(33), [140, 1, 9], None),
        (StreamingLLM(20, positions="original"), [100, 45, 5], (31, 4)),
    ],
    ids=lambda one: getattr(one, "name", str(one)),
)
def test_kept_keys_and_values_equal_those_of_the_librarys_cache_bit_for_bit(
    prompt, policy, chunks, target_blocks
):
    model, ids, states = prompt
    blocks = (9, 2, 30, 5, 11, 1, 7, 20, 3, 13)
    layers = run(states, policy, chunks, blocks, target_blocks)
    cache = CompressedCache(model, policy)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    for index, layer in enumerate(layers):
        _, keys, values = states[index]
        require_stored(layer, target_blocks or blocks, cache.kept_positions(index), keys, values)


def require_stored(layer, blocks, keep, keys, values):
    """Check that these blocks begin with exactly what (1, H or 1, K) positions keep."""
    layout, blocks, (heads, _, size) = make_layout([layer]), torch.tensor(blocks), keys.shape
    rows = keep[0].expand(heads, -1).unsqueeze(-1).expand(-1, -1, size)
    assert torch.equal(layout.read_keys(blocks, keep.shape[2])[0], keys.gather(1, rows))
    every = torch.arange(keep.shape[2])[None, None]
    assert torch.equal(layout.read_values(blocks, every)[0], values.gather(1, rows))


def test_unused_slots_of_the_last_block_have_no_nan(prompt):
    """The block may have the bytes of a recurrent state, and attention only masks its slots."""
    _, _, states = prompt
    targets = (31, 4, 17)
    for layer in run(states, SnapKV(40, window_size=16), [150], tuple(range(10)), targets):
        assert not layer.kv_cache[list(targets)].isnan().any()
        assert layer.kv_cache[16].isnan().all()


def test_block_size_that_does_not_divide_the_schedulers_is_refused():
    layer = engine_layer(2, 1, 8, block_tokens=32)
    with pytest.raises(UnsupportedModelError, match="--block-size 32"):
        compressor_of({"l": layer})


def kept_alone(policy, queries, keys, values):
    """What a policy keeps of one layer with (Hq, T, D) queries and (Hkv, T, D) keys and values."""
    layer = PromptLayer(
        queries=queries[None, :, -policy.query_tokens :],
        keys=keys[None],
        values=values[None],
        score_options=ScoreOptions(scaling=keys.shape[-1] ** -0.5),
        layer_idx=0,
    )
    return policy.select(layer).keep_indices


@pytest.mark.parametrize("at_once", [1, 1 << 30], ids=["one by one", "together"])
@pytest.mark.parametrize("policy", [SnapKV(48, kernel_size=13), TOVA(33)], ids=lambda one: one.name)
def test_half_precision_layers_keep_the_same_tokens_together_as_alone(
    prompt, monkeypatch, policy, at_once
):
    _, _, states = prompt
    halves = [tuple(of.bfloat16() for of in layer) for layer in states]
    monkeypatch.setattr(layers_module, "MAX_COPY_BYTES", at_once)
    blocks = (9, 2, 30, 5, 11, 1, 7, 20, 3, 13)
    layers = run(halves, policy, [100, 50], blocks, (31, 4, 17), torch.bfloat16)
    assert len(layers) > 1
    for layer, (queries, keys, values) in zip(layers, halves, strict=True):
        keep = kept_alone(policy, queries, keys, values)
        require_stored(layer, (31, 4, 17), keep, keys, values)


@pytest.mark.parametrize("of_queries", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    ("name", "byte_dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_keys_vote_with_their_scale_and_are_moved_unchanged(
    prompt, name, byte_dtype, of_queries, dtype
):
    """On GPUs, kernels may read queries in FP8, too."""
    _, _, states = prompt
    policy, blocks, targets = SnapKV(48), tuple(range(10)), [31, 4, 17]
    stored, layers = [], {}
    for index, (queries, keys, values) in enumerate(states):
        scales = {"_k_scale": 0.3 * (index + 1), "_v_scale": 1.7, "_q_scale": 0.6}
        both = (keys / scales["_k_scale"], values / scales["_v_scale"])
        asked = queries.to(dtype) if of_queries is None else (queries / 0.6).to(of_queries)
        stored.append((asked, *(half.to(byte_dtype).view(torch.uint8) for half in both)))
        layer = engine_layer(queries.shape[0], keys.shape[0], keys.shape[-1], dtype=torch.uint8)
        vars(layer).update(kv_cache_dtype=name, dtype=dtype)
        vars(layer).update((scale, torch.tensor(number)) for scale, number in scales.items())
        layers[str(index)] = layer
    layers = run(stored, policy, [140, 1, 9], blocks, tuple(targets), layers=layers)
    for layer, (asked, keys, values) in zip(layers, stored, strict=True):
        seen = (keys.view(byte_dtype).float() * layer._k_scale).to(dtype)
        asked = asked if of_queries is None else (asked.float() * layer._q_scale).to(dtype)
        keep = kept_alone(policy, asked, seen, seen)
        require_stored(layer, targets, keep, keys, values)


def voting(groups):
    return {
        group: {name: layers_module.voting_layer(layer) for name, layer in layers.items()}
        for group, layers in groups.items()
    }


def test_layers_that_differ_are_in_different_runs():
    layers = {
        "0": engine_layer(4, 2, 8),
        "1": engine_layer(4, 2, 8),
        "2": engine_layer(4, 2, 8, logits_soft_cap=30.0),
        "3": engine_layer(8, 2, 8),
        "4": engine_layer(8, 2, 8, sinks=torch.zeros(8)),
        "5": engine_layer(8, 2, 8, sinks=torch.ones(8)),
    }
    runs = layers_module.layer_runs(voting({0: layers, 1: {"6": engine_layer(4, 2, 8)}}))
    found = [(run.group, run.depth, list(run.layers)) for run in runs]
    assert found == [
        (0, 0, ["0", "1"]),
        (0, 2, ["2"]),
        (0, 3, ["3"]),
        (0, 4, ["4"]),
        (0, 5, ["5"]),
        (1, 6, ["6"]),
    ]


def test_copies_stay_below_the_allowed_bytes(monkeypatch):
    layers = {str(i): engine_layer(4, 2, 8, dtype=torch.bfloat16) for i in range(5)}
    (run,) = layers_module.layer_runs(voting({0: layers}))
    token = 2 * 2 * 8  # bytes of the keys of one token: two heads of eight
    monkeypatch.setattr(layers_module, "MAX_COPY_BYTES", 2 * token * (100 + 2 * 20))
    parts = list(run.split_by_memory(100, 20))
    assert [list(part.layers) for part in parts] == [["0", "1"], ["2", "3"], ["4"]]
    assert [part.depth for part in parts] == [0, 2, 4]
    assert [len(part.layers) for part in run.split_by_memory(10**6, 20)] == [1] * 5
