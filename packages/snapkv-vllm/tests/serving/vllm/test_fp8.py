"""Caches in FP8: votes read the decoded keys, and bytes are moved unchanged.

Answers are not compared with the library's: a byte is another one where a number differs in its
last digit, and the answer with it.
"""

from dataclasses import dataclass, field

import pytest
import torch

from snapkv import AdaKV, SnapKV, default_policy
from snapkv.errors import UnsupportedModelError
from snapkv.ops import ScoreOptions
from snapkv.policies import PromptLayer
from snapkv_vllm.layers import attention_layers
from snapkv_vllm.layouts import CpuLayout, NumberFormat
from tests.policies.reading import columns_kept
from tests.serving.vllm.engines import greedy, positions_of, small_engine
from tests.serving.vllm.models import ids_of

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="vLLM stores numbers in one byte only on processors with AVX-512",
)

BUDGET, CHUNK = 64, 150
MINUS_ZERO = 0x80
CODED = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SCALES = {"fp8_e4m3": (0.37, 2.9), "fp8_e5m2": (2.9, 0.37)}
"""Of keys, times the number of the layer, and of values."""


def stored(states, byte_dtype, scale):
    """The bytes of numbers, as vLLM's kernel for CPUs rounds: towards zero, and never to -0."""
    most = torch.finfo(byte_dtype).max
    scaled = (states * (1 / scale)).clamp(-most, most)
    nearest = scaled.to(byte_dtype)
    is_over = nearest.float().abs() > scaled.abs()
    stepped = nearest.view(torch.uint8) - is_over.byte()
    return stepped.where(stepped != MINUS_ZERO, 0)


@dataclass
class Seen:
    """What one layer was given to store, and the queries it attended with, token by token."""

    key_scale: float
    keys: list[torch.Tensor] = field(default_factory=list)
    queries: list[torch.Tensor] = field(default_factory=list)

    def decode_keys(self, byte_dtype):
        """(Hkv, T, D) of keys, as attention sees them."""
        keys = stored(torch.cat(self.keys), byte_dtype, self.key_scale).transpose(0, 1)
        return keys.view(byte_dtype).float() * self.key_scale


@pytest.fixture(
    scope="module",
    params=[
        ("fp8_e4m3", SnapKV(BUDGET)),
        ("fp8_e5m2", AdaKV(SnapKV(BUDGET))),
        ("fp8_e5m2", default_policy(BUDGET)),
    ],
    ids=lambda one: f"{one[0]}-{one[1].name}",
)
def recorded(small, request):
    """An engine whose layers have scales, as a checkpoint would bring them, and what they see."""
    name, policy = request.param
    options = {"budget": BUDGET, "policy": policy.name, "max_num_batched_tokens": CHUNK}
    with small_engine(small, kv_cache_dtype=name, **options) as engine:
        layers = []
        for index, layer in enumerate(attention_layers(engine.runner.vllm_config).values()):
            assert layer.kv_cache.dtype == torch.uint8
            scales = SCALES[name][0] * (index + 1), SCALES[name][1]
            layer._k_scale.fill_(scales[0])
            layer._v_scale.fill_(scales[1])
            layer._k_scale_float, layer._v_scale_float = scales
            layers.append(Seen(scales[0]))
            record(layer.impl, layers[-1])
        yield engine, layers, CODED[name], policy


def record(impl, seen):
    update, forward = impl.do_kv_cache_update, impl.forward

    def update_and_record(layer, key, value, cache, slots):
        seen.keys.append(key[: len(slots)].clone())
        update(layer, key, value, cache, slots)

    def forward_and_record(layer, query, *args, **more):
        seen.queries.append(query.clone())
        return forward(layer, query, *args, **more)

    impl.do_kv_cache_update, impl.forward = update_and_record, forward_and_record


@pytest.mark.parametrize("tokens", [97, 181, 302])
def test_kept_tokens_equal_those_of_the_library_on_decoded_fp8_keys(recorded, tokens):
    """Prompts have one chunk, or a window that crosses two chunks."""
    engine, layers, byte_dtype, policy = recorded
    prompt = ids_of(tokens, seed=tokens)
    for seen in layers:
        for states in (seen.keys, seen.queries):
            states.clear()
    with engine.watching() as kept:
        engine.answers([prompt], greedy(1))
    attended = [
        PromptLayer(
            queries=torch.cat(seen.queries).transpose(0, 1)[None, :, -policy.query_tokens :],
            keys=keys,
            values=keys,
            score_options=ScoreOptions(scaling=keys.shape[-1] ** -0.5),
            layer_idx=depth,
            depth=depth,
            num_layers=len(layers),
        )
        for depth, seen in enumerate(layers)
        for keys in [seen.decode_keys(byte_dtype)[None]]
    ]
    expected = [positions_of(one, tokens) for one in columns_kept(policy, attended)]
    assert kept.of(prompt) == expected


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize(
    ("block_tokens", "head_size", "dtype"),
    [(32, 64, torch.float32), (128, 32, torch.bfloat16), (32, 128, torch.float16)],
)
def test_every_byte_is_moved_unchanged(block_tokens, head_size, dtype, name):
    form = NumberFormat(dtype, CODED[name], name)
    every = torch.arange(256, dtype=torch.uint8)
    every = every[every.view(form.byte_dtype).float().isfinite() & (every != MINUS_ZERO)]
    tokens = 2 * block_tokens + 5
    keys, values = every[torch.randint(len(every), (2, 1, 3, tokens, head_size))]
    cache = torch.zeros(6, 3, block_tokens, 2 * head_size, dtype=torch.uint8)
    layout, blocks = CpuLayout([cache], "vec", form), torch.tensor([4, 1, 5])
    slots = torch.cat([block * block_tokens + torch.arange(block_tokens) for block in blocks])
    layout.write(slots[:tokens], keys, values)
    assert torch.equal(layout.read_keys(blocks, tokens), keys)
    assert torch.equal(layout.read_values(blocks, torch.arange(tokens)[None, None]), values)
    assert not cache[[0, 2, 3]].any()


def test_other_cache_formats_are_refused_by_name(small):
    with pytest.raises(UnsupportedModelError, match=r"int8_per_token_head is not supp.* fp8_e5m2"):
        small_engine(small, budget=BUDGET, kv_cache_dtype="int8_per_token_head")
