"""Heads as sequences on vLLM's Triton kernel equal a plain softmax, in the interpreter."""

from types import SimpleNamespace

import pytest
import torch

from snapkv_vllm.heads import HeadPlaces, HeadsAttention
from tests.serving.heads import spread
from tests.serving.vllm.conftest import SECOND_RUNNER
from tests.serving.vllm.test_graphs import make_metadata, make_triton_builder

pytestmark = pytest.mark.skipif(not SECOND_RUNNER, reason="needs Triton's interpreter")

GROUP, HEADS, SIZE, PAGE, BLOCKS = 2, 3, 64, 32, 64
PROMPT, MOST_KEPT, OTHERS = 200, 130, 40
NAMES = ["layer.0", "layer.1"]
OUR_BLOCKS, OTHER_BLOCKS = [7, 40, 3, 12, 33], [1, 2]


def make_layers(tokens_first):
    """Two layers as vLLM makes them, with caches of (blocks, heads, tokens, 2 * size)."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    caches = torch.zeros(len(NAMES), BLOCKS, HEADS, PAGE, 2 * SIZE)
    if tokens_first:
        caches = caches.transpose(2, 3).contiguous().transpose(2, 3)
    one = torch.ones(1)
    scales = {"_k_scale_float": 1.0, "_v_scale_float": 1.0, "_k_scale": one, "_v_scale": one}
    given = (HEADS * GROUP, SIZE, SIZE**-0.5, HEADS, None, None, "auto")
    return [
        SimpleNamespace(impl=TritonAttentionImpl(*given), kv_cache=cache, **scales)
        for cache in caches
    ]


def make_batch():
    """One new token of a plain request, then three of a request whose heads are apart."""
    tables = torch.zeros(2, 8, dtype=torch.int32)
    for table, blocks in zip(tables, (OTHER_BLOCKS, OUR_BLOCKS), strict=True):
        table[: len(blocks)] = torch.tensor(blocks)
    slots = [OTHER_BLOCKS[1] * PAGE + OTHERS - PAGE, 0, 1, 2]
    return make_metadata([1, 3], [OTHERS + 1, PROMPT + 3], tables, slots)


@pytest.fixture
def config(small, monkeypatch):
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    given = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 512}
    with set_current_vllm_config(EngineArgs(small.folder, **given).create_engine_config()):
        yield


@pytest.mark.usefixtures("config")
@pytest.mark.parametrize(
    ("kept", "across_layers"),
    [([[3, 130, 56], [63, 64, 62]], False), ([[3, 130, 20], [63, 100, 62]], True)],
    ids=["of-a-layer-tokens-first", "of-all-layers-heads-first"],
)
def test_heads_with_different_counts_attend_to_their_own_tokens(kept, across_layers):
    """The heads of a layer share its pages, or those of all layers the pages of all."""
    torch.manual_seed(0)
    layers, builder = make_layers(tokens_first=not across_layers), make_triton_builder(*NAMES)
    heads, kept = HeadsAttention(across_layers=across_layers), torch.tensor(kept)
    states = torch.randn(len(NAMES), HEADS, MOST_KEPT, 2 * SIZE)
    others = torch.randn(len(NAMES), HEADS, len(OTHER_BLOCKS) * PAGE, 2 * SIZE)
    pools = kept.reshape(1 if across_layers else len(NAMES), -1)
    by_pool = states.reshape(*pools.shape, MOST_KEPT, 2 * SIZE)
    laid = spread(HeadPlaces(pools, PAGE), by_pool, len(OUR_BLOCKS) * PAGE).reshape(
        len(NAMES), HEADS, -1, 2 * SIZE
    )
    for number, (name, layer) in enumerate(zip(NAMES, layers, strict=True)):
        for blocks, whole in ((OUR_BLOCKS, laid), (OTHER_BLOCKS, others)):
            layer.kv_cache[blocks] = whole[number].unflatten(1, (-1, PAGE)).transpose(0, 1)
        heads.patch_layer(name, layer)
        heads.record_kept("ours", name, kept[number], PROMPT)
    heads.patch_builder(builder)
    common = make_batch()
    heads.begin_step(["other", "ours"], [1, 4])
    metadata = builder.build(0, common)
    for number, layer in enumerate(layers):
        queries = torch.randn(4, HEADS * GROUP, SIZE)
        keys, values = torch.randn(2, 4, HEADS, SIZE)
        new, output = torch.cat([keys, values], dim=-1), torch.full_like(queries, float("nan"))
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, common.slot_mapping)
        layer.impl.forward(layer, queries, keys, values, layer.kv_cache, metadata, output=output)
        for head, count in enumerate(kept[number]):
            of_head = slice(head * GROUP, (head + 1) * GROUP)
            ours = states[number, head, MOST_KEPT - count :]
            held = (slice(0, 1), others[number, head, :OTHERS]), (slice(1, 4), ours)
            for rows, before in held:
                seen = torch.cat([before, new[rows, head]])
                expected = softmax_over(queries[rows, of_head], seen)
                assert torch.allclose(output[rows, of_head].double(), expected, atol=2e-6)


def softmax_over(queries, states):
    """(tokens, G, D) in float64; the last token sees all states, the one before all but one."""
    keys, values = states.double().chunk(2, dim=-1)
    scores = queries.double() @ keys.T * SIZE**-0.5
    behind = torch.arange(len(keys)) - (len(keys) - len(queries))
    scores.masked_fill_(behind > torch.arange(len(queries))[:, None, None], float("-inf"))
    return scores.softmax(dim=-1) @ values
