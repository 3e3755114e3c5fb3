"""One tiny random model per family, built from its real config class without a download."""

import functools

import torch
import transformers
from packaging import version
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from snapkv import CompressedCache

# After drafts were verified, transformers' own sliding layers make a mask of the wrong width for
# several tokens at once, with or without this library.
SLIDING_LAYERS_CRASH_AFTER_DRAFTS = version.parse(transformers.__version__) < version.parse("5.23")
DRAFTS_ARE_COMPILED = version.parse(transformers.__version__) >= version.parse("5.24")

VOCABULARY = 128

_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}

_OWN = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "cohere": {"use_qk_norm": True},
    "cohere2": {"sliding_window": 24, "sliding_window_pattern": 2},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
    },
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24},
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "phi3": {"partial_rotary_factor": 0.5, "sliding_window": None},
    "granite": {"attention_multiplier": 0.3},
    "olmo2": {},
    "glm4": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "deepseek_v3": {
        "num_key_value_heads": 8,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "rope_scaling": {"rope_type": "default", "rope_theta": 10000.0},
    },
}

FAMILIES = tuple(_OWN)

IMPLEMENTATIONS = {family: ("sdpa", "eager") for family in FAMILIES} | {
    "gemma2": ("eager",),  # transformers' sdpa refuses the soft-cap
    "gpt_oss": ("eager",),  # transformers' sdpa has no sinks
}

HYBRID = tuple(family for family in FAMILIES if _OWN[family].get("sliding_window"))
"""Families that have layers with a sliding window as well as full-attention layers."""

ONCE = tuple(
    (family, IMPLEMENTATIONS[family][index % len(IMPLEMENTATIONS[family])])
    for index, family in enumerate(FAMILIES)
)
"""Every family with one attention implementation, alternating between sdpa and eager."""

# Smaller ones, one per kind of layer, for suites of many cases.

_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 8,
}
_SLIDING = {
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
_LATENT = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 16,
    "n_routed_experts": 2,
}
_LINEAR = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
}
_SHARED = {
    "num_hidden_layers": 4,
    "global_head_dim": 8,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 64,
    "num_kv_shared_layers": 1,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", *["full_attention"] * 3],
}
_HYBRID = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
_MAMBA = {
    "shared_intermediate_size": 16,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "mamba_n_heads": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
    "attention_multiplier": 0.5,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
}
_JAMBA = {
    "num_hidden_layers": 4,
    "head_dim": None,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "mamba_d_state": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}
_KIMI = {
    **_LATENT,
    "num_hidden_layers": 4,
    "q_lora_rank": None,
    "n_routed_experts": None,
    "num_local_experts": 2,
    "num_experts_per_token": 1,
    "n_group": 1,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "full_attention"]}
KINDS = {
    "llama": ("llama", "sdpa", {}),
    "eager": ("llama", "eager", {}),
    "qk-norm": ("qwen3", "sdpa", {}),
    "sliding": ("gemma3_text", "sdpa", {"query_pre_attn_scalar": 8, **_SLIDING}),
    "soft-cap": ("gemma2", "eager", {"query_pre_attn_scalar": 8, **_SLIDING}),
    "no-rope": ("cohere2", "sdpa", {"logit_scale": 1.0, **_SLIDING}),
    "part-rope": ("glm4", "sdpa", {}),
    "latent": ("deepseek_v3", "sdpa", _LATENT),
    "sinks": ("gpt_oss", "eager", {"num_local_experts": 2, **_SLIDING}),
    "linear": ("qwen3_next", "sdpa", _LINEAR),
    "shared": ("gemma4_text", "sdpa", _SHARED),
    "hybrid": ("falcon_h1", "sdpa", _HYBRID),
    "gated delta": ("qwen3_5_text", "sdpa", _LINEAR),
    "mamba": ("granitemoehybrid", "sdpa", _MAMBA),
    "mamba beside": ("jamba", "eager", _JAMBA),
    "linear latent": ("kimi_linear", "sdpa", _KIMI),
    "convolutions": ("lfm2", "sdpa", _CONVOLUTIONS),
}
"""Family, attention implementation and settings, keyed by what is special about the kind."""


def small_config(kind: str, **changes):
    """Return the smallest config of a kind that still has all of its special features."""
    family, _, settings = KINDS[kind]
    settings = {**_SMALL, **settings, **changes}
    given = {name: value for name, value in settings.items() if value is not None}
    return tiny_config(family, **given)


@functools.cache
def small_model(kind: str) -> PreTrainedModel:
    """Return the small model of a kind, with peaked attention."""
    return peaked_model(small_config(kind), KINDS[kind][1])


def tiny_config(family: str, **changes):
    return AutoConfig.for_model(family, **{**_BASE, **_OWN.get(family, {}), **changes})


@functools.cache
def tiny_model(family: str, implementation: str = "sdpa") -> PreTrainedModel:
    """Return the tiny model of a family, with peaked attention."""
    return peaked_model(tiny_config(family), implementation)


def tiny_gpt2() -> PreTrainedModel:
    """Return a GPT-2, which has learned positions and transposed projections."""
    sizes = {"n_embd": 32, "n_head": 2, "n_layer": 2, "vocab_size": 64}
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", **sizes, bos_token_id=1, eos_token_id=2)
    return AutoModelForCausalLM.from_config(config).eval()


def peaked_model(config, implementation: str) -> PreTrainedModel:
    """Return a random model with peaked attention, so that evicting tokens changes the logits."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2 and "embed" not in name and not name.endswith("A_log"):
                weight.mul_(4.0)
            if name.endswith("sinks"):
                weight.normal_()
        embedded = model.get_input_embeddings().weight
        if config.pad_token_id is not None:  # else all scores of an indexer's query are zero, tied
            embedded[config.pad_token_id].normal_(std=0.02)
    return model.float().eval()


def random_ids(batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=generator)


CLOSE = {"atol": 1e-4, "rtol": 1e-4}
"""Tolerances for logits that differ only by the order of float32 sums."""


@torch.no_grad()
def call(model, cache, ids, **options) -> torch.Tensor:
    """Return the logits of one forward pass with a cache, (B, N, V)."""
    return model(ids, past_key_values=cache, **options).logits


def read(model, policy, ids, mask=None, **options) -> CompressedCache:
    """Return a new cache that has read the prompt `ids`."""
    cache = CompressedCache(model, policy, **options)
    call(model, cache, ids, attention_mask=mask)
    return cache


def kept_of(cache) -> list:
    """Return the kept positions of every row and head, for each compressed layer."""
    return [cache.kept_positions(layer).tolist() for layer in cache.compressed_layers]


def generated(model, cache, ids, **options) -> torch.Tensor:
    """Return the ids and a greedy answer after them, (B, T); by default it has six tokens."""
    usual = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    return model.generate(ids, past_key_values=cache, **usual | options)


def left_padded(lengths, seed=0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask of left-padded rows of these lengths."""
    longest = max(lengths)
    ids, mask = random_ids(len(lengths), longest, seed), torch.ones(len(lengths), longest).long()
    for row, tokens in enumerate(lengths):
        mask[row, : longest - tokens] = 0
    return ids * mask, mask


def require_integrity(layer):
    """Check that the counts of a compressed layer agree with its slots and its store."""
    slots, store = layer.slots, layer.store
    assert layer.seen_tokens == slots.count_seen(store.slots), "tokens seen"
    assert slots.chosen_slots <= store.slots, "slots of what was chosen"
    assert slots.chosen_at <= layer.seen_tokens, "tokens seen at the last choice"
    assert 0 <= slots.removed_tokens <= layer.seen_tokens, "tokens that are no columns"
