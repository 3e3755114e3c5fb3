"""What each layer of a model keeps, by the votes of queries and keys out of its own projections.

An answer does not tell a layer that keeps its neighbour's positions, or whose queries vote before
they are turned.
"""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from snapkv import CompressedCache
from snapkv.policies import SnapKV
from tests.ops import oracle

PROMPT_TOKENS, WINDOW, BUDGET, KERNEL = 48, 8, 18, 3
LAYERS = 4


@pytest.fixture(scope="module")
def model():
    """Random, and attentive enough that layers, rotation and scale change what is kept."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(0, 64, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def hidden_states(model, prompt):
    """What goes into each layer, from transformers alone: (B, T, hidden)."""
    with torch.no_grad():
        output = model(prompt, output_hidden_states=True, use_cache=False)
    return output.hidden_states[:LAYERS]


def true_states(model, hidden_states, layer_idx):
    """Queries of the window and all keys, from the layer's projections: (1, heads, tokens, D)."""
    block = model.model.layers[layer_idx]
    attention = block.self_attn
    with torch.no_grad():
        hidden = block.input_layernorm(hidden_states[layer_idx])
        shape = (1, PROMPT_TOKENS, -1, attention.head_dim)
        queries = attention.q_proj(hidden).view(shape).transpose(1, 2)
        keys = attention.k_proj(hidden).view(shape).transpose(1, 2)
        positions = torch.arange(PROMPT_TOKENS)[None]
        cosine, sine = model.model.rotary_emb(hidden, positions)
        queries, keys = apply_rotary_pos_emb(queries, keys, cosine, sine)
    return queries[:, :, -WINDOW:], keys


def expected_kept(model, hidden_states, layer_idx):
    queries, keys = true_states(model, hidden_states, layer_idx)
    scores = oracle.pooled_scores(
        queries[0].tolist(),
        keys[0].tolist(),
        scaling=1 / math.sqrt(queries.shape[-1]),
        kernel_size=KERNEL,
        pooling="max",
        group_reduce="mean",
    )
    for head in scores:
        assert oracle.cut_gap(head, BUDGET - WINDOW) > 1e-4, "rounding could decide: new seed"
    return [oracle.kept_positions(head, PROMPT_TOKENS, BUDGET - WINDOW) for head in scores]


@pytest.fixture(scope="module")
def cache(model, prompt, hidden_states):
    cache = CompressedCache(model, SnapKV(budget=BUDGET, window_size=WINDOW, kernel_size=KERNEL))
    with torch.no_grad():
        model(prompt, past_key_values=cache)
    return cache


@pytest.mark.parametrize("layer_idx", [0, LAYERS - 1])
def test_each_layer_keeps_what_its_own_queries_vote_for(model, hidden_states, cache, layer_idx):
    expected = expected_kept(model, hidden_states, layer_idx)
    assert cache.kept_positions(layer_idx)[0].tolist() == expected
