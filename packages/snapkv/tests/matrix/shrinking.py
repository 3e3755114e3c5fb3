"""A tiny model of every causal language model that the installed transformers knows.

What a config's fields are called says how small they can be, so the table is by field. A model's
own settings stand in `OWN` only where its class defaults are none of a model that people run.
"""

import copy
import functools
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

_SEEING = {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES} - {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
SEEING = tuple(sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))
MODELS = tuple(sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *_SEEING}))
"""All models by `model_type`; models that accept images are tested with text."""

VOCABULARY = 64
HEADS = 4
HEAD_DIM = 16
WIDTH = HEADS * HEAD_DIM
WINDOW = 12
IMAGE_ID = VOCABULARY - 1
IMAGE_SIZE = 32

_SIZES: dict[str, Any] = {
    name: size
    for size, names in (
        (
            WIDTH,
            "hidden_size d_model n_embd emb_dim dim_model word_embed_proj_dim embedding_size "
            "input_embedding_size embedding_dim lru_width attention_hidden_size out_hidden_size "
            "hidden_size_per_layer_input projection_dim embed_dim mm_embed_dim output_proj_dims "
            "projection_hidden_size projector_hidden_size",
        ),
        (
            HEADS,
            "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
            "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
            "swa_num_attention_heads",
        ),
        (
            HEAD_DIM,
            "head_dim kv_channels dim_head d_head attention_head_size attention_head_dim "
            "swa_head_dim global_head_dim query_pre_attn_scalar",
        ),
        (
            48,
            "intermediate_size ffn_dim ffn_hidden_size dim_ff dff d_inner decoder_ffn_dim "
            "encoder_ffn_dim intermediate_size_mlp",
        ),
        (
            16,
            "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
            "dense_intermediate_size moe_shared_expert_intermediate_size feed_forward_size "
            "shared_experts_intermediate_size shared_intermediate_size router_hidden_size "
            "ple_embed_dim dim_model_base mamba_chunk_size chunk_size",
        ),
        (4, "resampler_n_latents"),
        (0.02, "initializer_range"),  # next to nothing in one, where an image would not matter
        (4, "num_experts n_routed_experts num_local_experts moe_num_experts gated_norm_rank"),
        (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k"),
        (1, "n_group topk_group num_expert_group n_groups mamba_ngroups mamba_n_groups"),
        (1, "first_k_dense_replace num_dense_layers moe_layer_start_index"),
        (1, "n_shared_experts num_shared_experts moe_num_shared_experts"),
        (0, "num_nextn_predict_layers zero_expert_num"),
        (8, "qk_rope_head_dim o_lora_rank rotary_dim laurel_rank d_rel adapter_rank hc_lowrank"),
        (16, "kv_lora_rank qk_nope_head_dim index_head_dim floor_scale"),
        (24, "q_lora_rank qk_head_dim"),
        (12, "v_head_dim"),
        (2, "index_n_heads linear_num_key_heads linear_num_heads split_ngram_parts"),
        (8, "index_block_size block_size patch_size"),
        (WINDOW, "sliding_window sliding_window_size attention_chunk_size attention_window_size"),
        (WINDOW, "local_attention window_size"),
        (8, "linear_key_head_dim linear_value_head_dim linear_head_dim state_size ssm_state_size"),
        (8, "mamba_d_state mamba_n_heads mamba_num_heads n_mamba_heads"),
        (16, "mamba_d_head mamba_head_dim mamba_headdim"),
        (4, "linear_num_value_heads mamba_dt_rank time_step_rank mm_tokens_per_image"),
        (2 * WIDTH, "mamba_d_ssm ngram_vocab_size_base"),
        (512, "max_position_embeddings n_positions max_seq_len n_ctx max_sequence_length"),
        (512, "model_max_length context_length max_target_positions max_source_positions"),
        (
            VOCABULARY,
            "vocab_size unpadded_vocab_size vocab_size_per_layer_input shape_vocab_size "
            "pronunciation_vocab_size encoder_hash_byte_group_vocab num_position_embeddings",
        ),
        (IMAGE_SIZE, "rel_extent image_size"),
        (2, "depth num_layers_per_stack n_layers_per_attn_res_block"),
        (1, "decoder_start_token_id bos_token_id o_groups"),
        (0, "pad_token_id"),
    )
    for name in names.split()
}
"""The small value of each config field; 0 and 1 stay, because they switch features off."""

_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups")
_KV_HEADS += ("num_global_key_value_heads",)
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_LAYERS += ("num_decoder_layers", "layers", "encoder_layers", "num_encoder_layers", "num_blocks")
_NEEDED = ("head_dim", "n_routed_experts", "num_experts_per_tok")  # None by default in some
_OF_HEADS = ("head_dim", "qk_head_dim")
_OF_IMAGES = ("image_token_id", "image_token_index")
_GROWING = ("full_attention", "indexed_attention", "hybrid", "global", "attention")

_ATTENDING = {"sliding_window": None}


def _turned_three_ways(*numbers: int, **options: float) -> dict[str, Any]:
    """Return rope settings for positions on three axes; `numbers` are the head sections of each."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(numbers)}
    return {"rope_parameters": rope | options}


_SLIDING = ["sliding_attention", "full_attention", "full_attention"]
_STATES = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_UNNAMED = {"vision_start_token_id": 1}  # which published configs have and the class has not
_IN_WINDOWS = {"window_size": 32, "fullatt_block_indexes": [1]}
_ONE_TILE = {"image_grid_pinpoints": [[IMAGE_SIZE, IMAGE_SIZE]]}
OWN: dict[str, dict[str, Any]] = {
    "mistral": _ATTENDING,  # the window of the first release, that of none since
    "ministral": {"layer_types": _SLIDING},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": _STATES},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "gemma3n_text": {
        "layer_types": [*_SLIDING, "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 5,
        "intermediate_size": 48,
    },
    "dots3_note_text": {
        "layer_types": ["sliding_attention", "indexed_attention"],
        "per_layer_config": {},
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
    },
    "longcat_flash": {"head_dim": 8},
    "zamba": {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * HEAD_DIM},
    "zamba2": {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * HEAD_DIM},
    "doge": {"keep_window_size": 16},
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "index_topk_blocks": 2,
    },
    "dots1": {"n_shared_experts": 1},
    "xmod": {"default_language": "en_XX"},
    "gemma4_text": {
        "layer_types": [*_SLIDING, "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
    },
    **dict.fromkeys(
        (
            "qwen2_vl_text",
            "qwen2_5_vl_text",
            "qwen2_5_omni_text",
            "glm4v_text",
            "glm_ocr_text",
            "paddleocr_vl_text",
        ),
        _turned_three_ways(2, 3, 3),
    ),
    "glm4v_moe_text": _turned_three_ways(2, 1, 1, partial_rotary_factor=0.5),
    "ernie4_5_vl_moe_text": _turned_three_ways(3, 3, 2) | {"moe_intermediate_size": [16, 16]},
    "hunyuan_vl_text": _turned_three_ways(2, 2, 2, 2),
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), _UNNAMED),
    **dict.fromkeys(
        ("qwen2_5_vl_vision", "qwen2_5_omni_vision_encoder", "exaone4_5_vision"), _IN_WINDOWS
    ),
    "step3p5": {"sliding_window": WINDOW},
    "mistral4": {
        "qk_nope_head_dim": 8,
        "rope_parameters": {  # only yarn turns a part of a head
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1,
            "partial_rotary_factor": 0.5,
        },
    },
    "llama4_vision_model": {
        "intermediate_size": 4 * WIDTH,
        "projector_input_dim": WIDTH,
        "projector_output_dim": WIDTH,
        "vision_output_dim": WIDTH,
    },
    "janus_vqgan": {"base_channels": 32},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "vipllava": {"vision_feature_layers": [-2, -1]},
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision"), _ONE_TILE),
    "mllama_text_model": {"cross_attention_layers": [1]},
    "mllama_vision_model": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 3 * WIDTH},
    "mamba2": {"num_heads": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 4},
}
OWN["granitemoehybrid"] |= {"position_embedding_type": "rope"}


def _layers(config: Any) -> int | None:
    return next((getattr(config, name) for name in _LAYERS if hasattr(config, name)), None)


def _chosen(config: Any) -> list[int]:
    """Return indices of a few layers that include every kind and two that grow."""
    count = _layers(config)
    lists = {name: value for name, value in _saved(config).items() if _is_by_layer(value, count)}
    kinds = list(zip(*lists.values(), strict=True)) if lists else [()] * (count or 0)
    kinds = [tuple(part for part in kind if isinstance(part, str)) for kind in kinds]
    first = [index for index, kind in enumerate(kinds) if kind not in kinds[:index]][:4]
    if not any(kinds):
        return list(range(min(3, count or 3)))
    growing = [index for index, kind in enumerate(kinds) if {*kind} & {*_GROWING}]
    for index in growing:
        if len({*first} & {*growing}) >= 2:
            break
        if index not in first:
            first.append(index)
    return sorted(first)


def _is_by_layer(value: Any, count: int | None) -> bool:
    return isinstance(value, list) and count is not None and len(value) == count > 2


def _saved(config: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if not name.startswith("_")}


def shrunk(config: Any, *, groups: bool = True) -> Any:
    """Return the config with small sizes; with `groups`, query heads share keys and values."""
    own = OWN.get(config.model_type, {})
    count, chosen = _layers(config), _chosen(config)
    changes: dict[str, Any] = {}
    for name, value in _saved(config).items():
        if name in _LAYERS and isinstance(value, int):
            changes[name] = min(value, len(chosen))
        elif name in _KV_HEADS and not isinstance(value, bool):
            changes[name] = 1 if value == 1 else 2 if groups else HEADS
        elif _is_by_layer(value, count):
            changes[name] = [value[index] for index in chosen]
        elif (
            name in _SIZES
            and (value is not None or name in _NEEDED)
            and not isinstance(value, bool)
        ):
            changes[name] = value if value == 1 else _SIZES[name]
        elif name == "rope_parameters" and value:
            changes[name] = _plain_rope(value)
        elif name in _OF_IMAGES:
            changes[name] = IMAGE_ID
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int):
            changes[name] = _token(name, value)
        elif hasattr(value, "to_dict"):
            changes[name] = shrunk(value, groups=groups).to_dict()
    if getattr(config, "kv_lora_rank", None):  # heads of a size by themselves, none shared
        changes = {name: each for name, each in changes.items() if name not in _OF_HEADS}
        changes |= {"num_key_value_heads": HEADS}
    changes |= {"eos_token_id": None} | own
    if "layer_types" in own:
        changes["num_hidden_layers"] = len(changes["layer_types"])
    return type(config)(**changes)


def _token(name: str, token: int) -> int | None:
    """None of them is that of images, and that of videos is its own."""
    return None if name == "eos_token_id" else min(token, IMAGE_ID - ("video" not in name) - 1)


def _plain_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Return rope settings without those that depend on a length or a head size."""
    if any(isinstance(part, dict) for part in rope.values()):
        return {name: part and _plain_rope(part) for name, part in rope.items()}
    plain = rope | {"rope_type": "default"}
    if "original_max_position_embeddings" in rope:
        plain["original_max_position_embeddings"] = 16
    if (part := rope.get("partial_rotary_factor")) is not None:
        plain["partial_rotary_factor"] = max(part, 0.5)
    if sections := rope.get("mrope_section"):
        numbers = int(HEAD_DIM * plain.get("partial_rotary_factor", 1)) // 2
        share = numbers // len(sections)
        plain["mrope_section"] = [numbers - share * (len(sections) - 1)] + [share] * (
            len(sections) - 1
        )
    return plain


def growing_layers(model_type: str) -> tuple[int, int]:
    """Return how many layers grow with the context and the layer count of the default config.

    The tiny model is used if the class defaults are not those of a model that people run.
    """
    config = CONFIG_MAPPING[model_type]().get_text_config(decoder=True)
    if has_own_layers(model_type):
        config = tiny(model_type).config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    of_images = getattr(config, "cross_attention_layers", None) or ()
    return sum(map(_grows, layers)) - len(of_images), len(layers)


def has_own_layers(model_type: str) -> bool:
    """Return whether the layer kinds of the tiny model differ from the class defaults."""
    config = CONFIG_MAPPING[model_type]().get_text_config(decoder=True)
    names = ("layer_types", "sliding_window", "attn_layer_indices")
    return any(name in OWN.get(config.model_type, {}) for name in names)


def _grows(layer: Any) -> bool:
    return isinstance(layer, DynamicLayer) and not isinstance(layer, DynamicSlidingWindowLayer)


def _config(model_type: str) -> Any:
    """Return the default config, with a vision config added if it is missing."""
    made = CONFIG_MAPPING[model_type]()
    lacking = [name for name in made.sub_configs if "vision" in name and not getattr(made, name)]
    return type(made)(**{name: {} for name in lacking}) if lacking else made


@functools.cache
def tiny(model_type: str) -> PreTrainedModel:
    """Return the tiny model, with weights that make its attention peaked."""
    sees = model_type in _SEEING
    return _tiny(model_type, AutoModelForImageTextToText if sees else AutoModelForCausalLM)


@functools.cache
def seeing(model_type: str) -> PreTrainedModel:
    """Return the tiny model that accepts images, often the same model as for text."""
    names = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    if names[0].get(model_type) in (None, names[1][model_type]):
        return tiny(model_type)
    return _tiny(model_type, AutoModelForImageTextToText)


def _tiny(model_type: str, kind: Any) -> PreTrainedModel:
    failed: list[Exception] = []
    for groups in (True, False):
        try:
            config = shrunk(_config(model_type), groups=groups)
            torch.manual_seed(0)
            model = kind.from_config(config).float().eval()
            _answer(model)
        except Exception as error:  # the next way to make it may work
            failed.append(error)
        else:
            return _peaked(model)
    raise failed[0]


def _peaked(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy with larger weights, so that evicting tokens changes the logits."""
    for factor in (4.0, 2.0, 1.0):
        greater = copy.deepcopy(model)
        with torch.no_grad():
            for name, weight in greater.named_parameters():
                if weight.ndim >= 2 and "embed" not in name and weight.is_floating_point():
                    weight.mul_(factor)
                    if not bool(weight.any()):  # to be learned, such as what goes from an image
                        weight.normal_(std=0.1)
                if name.endswith(("sinks", "attn_gate", "mlp_gate")):
                    weight.normal_()
        if bool(torch.isfinite(_answer(greater)).all()):
            return greater
    return model


@torch.no_grad()
def _answer(model: PreTrainedModel) -> torch.Tensor:
    return model(torch.arange(3, 43).view(1, -1), use_cache=False).logits
