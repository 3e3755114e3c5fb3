"""Voting and moving on tensors, against the cache of the library; no vLLM is needed."""

from types import SimpleNamespace

import pytest
import torch

from snapkv import TOVA, CompressedCache, SnapKV, StreamingLLM
from snapkv.errors import UnsupportedModelError
from snapkv.serving.compressor import Compressor
from snapkv.serving.layouts.plain import PlainLayout
from snapkv.serving.orders import Order, order_for
from tests.families import random_ids, tiny_model

BLOCK = 16


class Backend:
    @staticmethod
    def get_name():
        return "FLASH_ATTN"


def engine_layer(heads, kv_heads, head_size, blocks=32, block_tokens=BLOCK):
    """What vLLM has of a layer: an implementation that is called, and a cache of blocks."""
    impl = SimpleNamespace(scale=head_size**-0.5, forward=lambda layer, query, *args: query)
    return SimpleNamespace(
        impl=impl,
        num_heads=heads,
        head_size=head_size,
        kv_cache=torch.full((blocks, kv_heads, block_tokens, 2 * head_size), float("nan")),
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
    slots = torch.tensor([blocks[t // BLOCK] * BLOCK + t % BLOCK for t in range(keys.shape[1])])
    PlainLayout(layer.kv_cache, layer.head_size).write(slots, keys[None], values[None])


def run(states, policy, chunks, blocks, target_blocks=None):
    """All of a prompt in chunks through a compressor; returns it and its layers."""
    q, k, _ = states[0]
    layers = {
        f"layer.{i}": engine_layer(q.shape[0], k.shape[0], q.shape[-1]) for i in range(len(states))
    }
    compressor = Compressor(layers, block_tokens=BLOCK, device=torch.device("cpu"))
    compressor.bind_caches()
    for layer, (_, keys, values) in zip(layers.values(), states, strict=True):
        fill(layer, blocks, keys, values)
    computed, length = 0, k.shape[1]
    for step in chunks:
        computed += step
        order = order_for(policy, prompt_tokens=length, computed_tokens=computed, step_tokens=step)
        if order is None:
            continue
        order = Order(**{**vars(order), "target_blocks": target_blocks})
        rows = slice(step - order.query_tokens, step)
        compressor.recorder.wanted = {"a": rows} if order.query_tokens else {}
        for layer, (queries, _, _) in zip(layers.values(), states, strict=True):
            layer.impl.forward(layer, queries[:, computed - step : computed].transpose(0, 1))
        compressor.compress({"a": order}, {"a": list(blocks)})
    assert not compressor.recorder.recorded
    return list(layers.values())


@pytest.mark.parametrize(
    "policy",
    [
        SnapKV(48),
        SnapKV(40, window_size=16, kernel_size=13, pooling="avg", group_reduce="max"),
        TOVA(33),
        StreamingLLM(20, positions="original"),
    ],
    ids=lambda policy: f"{policy.name}-{policy.budget}",
)
@pytest.mark.parametrize("chunks", [[150], [100, 45, 5], [140, 1, 9]], ids=str)
@pytest.mark.parametrize("target_blocks", [None, (31, 4, 17)], ids=["in-place", "elsewhere"])
def test_kept_tokens_are_those_of_the_librarys_cache_bit_for_bit(
    prompt, policy, chunks, target_blocks
):
    model, ids, states = prompt
    blocks = (9, 2, 30, 5, 11, 1, 7, 20, 3, 13)
    layers = run(states, policy, chunks, blocks, target_blocks)
    cache = CompressedCache(model, policy)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    for index, layer in enumerate(layers):
        kept = torch.tensor(target_blocks or blocks)
        layout = PlainLayout(layer.kv_cache, layer.head_size)
        keys = layout.read_keys(kept, policy.budget)
        values = layout.read_values(kept, torch.arange(policy.budget)[None, None])
        _, all_keys, all_values = states[index]
        keep = cache.kept_positions(index).expand(-1, keys.shape[1], -1)
        rows = keep[0].unsqueeze(-1).expand(-1, -1, keys.shape[-1])
        assert torch.equal(keys[0], all_keys.gather(1, rows))
        assert torch.equal(values[0], all_values.gather(1, rows))


def test_requests_of_a_step_read_before_any_writes(prompt):
    """One may move into blocks that the other has given up."""
    _, _, states = prompt
    q, k, v = states[0]
    layer = engine_layer(q.shape[0], k.shape[0], q.shape[-1])
    compressor = Compressor({"l": layer}, block_tokens=BLOCK, device=torch.device("cpu"))
    compressor.bind_caches()
    mine, yours = list(range(10)), list(range(10, 20))
    fill(layer, mine, k, v)
    fill(layer, yours, -k, -v)
    order = Order(
        policy=StreamingLLM(32, positions="original"),
        prompt_tokens=150,
        query_tokens=0,
        compress=True,
    )
    swapped = {
        "a": Order(**{**vars(order), "target_blocks": (10, 11)}),
        "b": Order(**{**vars(order), "target_blocks": (0, 1)}),
    }
    compressor.compress(swapped, {"a": mine, "b": yours})
    layout = PlainLayout(layer.kv_cache, layer.head_size)
    keep = [*range(4), *range(122, 150)]
    assert torch.equal(layout.read_keys(torch.tensor([10, 11]), 32)[0], k[:, keep])
    assert torch.equal(layout.read_keys(torch.tensor([0, 1]), 32)[0], -k[:, keep])


def test_other_blocks_than_the_scheduler_counts_are_refused():
    layer = engine_layer(2, 1, 8, block_tokens=32)
    compressor = Compressor({"l": layer}, block_tokens=BLOCK, device=torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match="--block-size 32"):
        compressor.bind_caches()


def test_the_plain_layout_puts_keys_before_values_and_spares_other_slots():
    cache = torch.zeros(3, 2, 4, 6)
    layout = PlainLayout(cache, 3)
    keys, values = torch.randn(1, 2, 2, 3), torch.randn(1, 2, 2, 3)
    layout.write(torch.tensor([11, 4]), keys, values)
    assert torch.equal(cache[2, :, 3], torch.cat([keys[0, :, 0], values[0, :, 0]], dim=-1))
    assert torch.equal(cache[1, :, 0], torch.cat([keys[0, :, 1], values[0, :, 1]], dim=-1))
    assert int((cache.abs().sum(dim=(1, 3)) > 0).sum()) == 2
    read = layout.read_keys(torch.tensor([1, 2]), 8)
    assert torch.equal(read[0, :, 0], keys[0, :, 1])
    assert torch.equal(read[0, :, 7], keys[0, :, 0])
    picked = layout.read_values(torch.tensor([1, 2]), torch.tensor([[[0, 7], [7, 5]]]))
    assert torch.equal(picked[0, 0], torch.stack([values[0, 0, 1], values[0, 0, 0]]))
    assert torch.equal(picked[0, 1, 0], values[0, 1, 0])
    assert not picked[0, 1, 1].any()
