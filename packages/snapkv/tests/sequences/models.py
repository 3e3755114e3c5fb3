"""The kinds of models: as small as they can be and still have all that can go wrong."""

import functools

from transformers import PreTrainedModel

from tests.families import peaked_model, tiny_config
from tests.oracle import unwrapped

_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
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
}
"""Family, attention implementation and settings, by what makes the kind special."""

COMPRESSED = {
    kind: 2 if "layer_types" in settings or kind == "latent" else 3
    for kind, (_, _, settings) in KINDS.items()
}
"""How many layers are compressed."""

VOCABULARY, KV_HEADS = 64, 2


@functools.cache
def small_model(kind: str) -> PreTrainedModel:
    """The model of that kind."""
    family, implementation, changes = KINDS[kind]
    settings = {name: value for name, value in {**_SMALL, **changes}.items() if value is not None}
    return peaked_model(tiny_config(family, **settings), implementation)


@functools.cache
def judge_of(kind: str) -> PreTrainedModel:
    """A copy of it that has nothing to do with the library, and hides what it is told to."""
    reference = unwrapped(small_model(kind), "eager")
    reference.set_attn_implementation("masked_oracle")
    return reference
