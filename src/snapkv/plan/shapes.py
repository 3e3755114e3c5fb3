"""Published models by name, for plans and benchmarks: what the `config.json` of each one says.

Every entry names the repository on the Hugging Face hub whose ``config.json`` it repeats, its
positions included, and the parameters of the checkpoint there; of a model that also sees, those of
its language model.
`tests/plan/test_shapes.py` builds each one from its configuration and compares.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from snapkv.errors import InvalidArgumentError
from snapkv.plan.footprint import positions_of
from snapkv.plan.weights import quantization_of
from snapkv.validation import nearest


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is published of a model.

    Attributes:
        repository: on the hub, whose ``config.json`` this repeats.
        family: the configuration's `model_type`.
        config: its settings, where they are not transformers' defaults.
        parameters: of the checkpoint.
    """

    repository: str
    family: str
    config: dict[str, Any]
    parameters: int


_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "vocab_size",
)


def _decoder(*sizes: int) -> dict[str, Any]:
    """The sizes that every configuration has, in the order of `_SIZES`."""
    return dict(zip(_SIZES, sizes, strict=True))


_TIED, _UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
_K = 1024


def _llama(repository: str, parameters: int, *sizes: int, tied: bool = False) -> Shape:
    config = _decoder(*sizes) | {"tie_word_embeddings": tied}
    return Shape(repository=repository, family="llama", config=config, parameters=parameters)


def _qwen3(repository: str, parameters: int, *sizes: int, tied: bool = False) -> Shape:
    config = _decoder(*sizes, 40960, 151936) | {"head_dim": 128, "tie_word_embeddings": tied}
    return Shape(repository=repository, family="qwen3", config=config, parameters=parameters)


def _mistral(repository: str, parameters: int, *sizes: int) -> Shape:
    config = _decoder(*sizes) | {"head_dim": 128, "sliding_window": None} | _UNTIED
    return Shape(repository=repository, family="mistral", config=config, parameters=parameters)


def _gemma3(repository: str, parameters: int, *sizes: int, head_dim: int, scale: int) -> Shape:
    """The language model; five layers slide over 1,024 tokens, then one sees all."""
    own = {"head_dim": head_dim, "query_pre_attn_scalar": scale, "sliding_window": 1024}
    config = _decoder(*sizes, 128 * _K, 262208) | own | _TIED
    return Shape(repository=repository, family="gemma3_text", config=config, parameters=parameters)


def _gpt_oss(repository: str, parameters: int, *, layers: int, experts: int) -> Shape:
    """Every other layer slides over 128 tokens; the experts' weights are stored in four bits."""
    own = {
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    config = _decoder(2880, 2880, layers, 64, 8, 128 * _K, 201088) | own | _UNTIED
    return Shape(repository=repository, family="gpt_oss", config=config, parameters=parameters)


SHAPES: dict[str, Shape] = {
    "smollm2-135m": _llama(
        "HuggingFaceTB/SmolLM2-135M", 134_515_008, 576, 1536, 30, 9, 3, 8192, 49152, tied=True
    ),
    "qwen3-0.6b": _qwen3("Qwen/Qwen3-0.6B", 596_049_920, 1024, 3072, 28, 16, 8, tied=True),
    "qwen3-1.7b": _qwen3("Qwen/Qwen3-1.7B", 1_720_574_976, 2048, 6144, 28, 16, 8, tied=True),
    "qwen3-4b": _qwen3("Qwen/Qwen3-4B", 4_022_468_096, 2560, 9728, 36, 32, 8, tied=True),
    "qwen3-8b": _qwen3("Qwen/Qwen3-8B", 8_190_735_360, 4096, 12288, 36, 32, 8),
    "qwen3-14b": _qwen3("Qwen/Qwen3-14B", 14_768_307_200, 5120, 17408, 40, 40, 8),
    "qwen3-32b": _qwen3("Qwen/Qwen3-32B", 32_762_123_264, 5120, 25600, 64, 64, 8),
    "qwen3-30b-a3b": Shape(
        repository="Qwen/Qwen3-30B-A3B",
        family="qwen3_moe",
        config=_decoder(2048, 6144, 48, 32, 4, 40960, 151936)
        | {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
        | {"moe_intermediate_size": 768}
        | _UNTIED,
        parameters=30_532_122_624,
    ),
    "qwen2.5-7b": Shape(
        repository="Qwen/Qwen2.5-7B",
        family="qwen2",
        config=_decoder(3584, 18944, 28, 28, 4, 128 * _K, 152064) | _UNTIED,
        parameters=7_615_616_512,
    ),
    "llama-3.1-8b": _llama(
        "meta-llama/Llama-3.1-8B", 8_030_261_248, 4096, 14336, 32, 32, 8, 128 * _K, 128256
    ),
    "llama-3.1-70b": _llama(
        "meta-llama/Llama-3.1-70B", 70_553_706_496, 8192, 28672, 80, 64, 8, 128 * _K, 128256
    ),
    "llama-3.3-70b": _llama(
        "meta-llama/Llama-3.3-70B-Instruct",
        *(70_553_706_496, 8192, 28672, 80, 64, 8, 128 * _K, 128256),
    ),
    "mistral-7b": _mistral(
        "mistralai/Mistral-7B-Instruct-v0.2",
        *(7_241_732_096, 4096, 14336, 32, 32, 8, 32 * _K, 32000),
    ),
    "mistral-small-24b": _mistral(  # 3.1, and 3.2, whose sizes are the same
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
        *(23_572_403_200, 5120, 32768, 40, 32, 8, 128 * _K, 131072),
    ),
    "mixtral-8x7b": Shape(
        repository="mistralai/Mixtral-8x7B-Instruct-v0.1",
        family="mixtral",
        config=_decoder(4096, 14336, 32, 32, 8, 32 * _K, 32000)
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
        | _UNTIED,
        parameters=46_702_792_704,
    ),
    "gemma-2-9b": Shape(  # every other layer slides
        repository="google/gemma-2-9b",
        family="gemma2",
        config=_decoder(3584, 14336, 42, 16, 8, 8192, 256000)
        | {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096}
        | _TIED,
        parameters=9_241_705_984,
    ),
    "gemma-3-4b": _gemma3(
        "google/gemma-3-4b-it", 3_880_263_168, 2560, 10240, 34, 8, 4, head_dim=256, scale=256
    ),
    "gemma-3-12b": _gemma3(
        "google/gemma-3-12b-it", 11_766_034_176, 3840, 15360, 48, 16, 8, head_dim=256, scale=256
    ),
    "gemma-3-27b": _gemma3(
        "google/gemma-3-27b-it", 27_009_346_304, 5376, 21504, 62, 32, 16, head_dim=128, scale=168
    ),
    "gpt-oss-20b": _gpt_oss("openai/gpt-oss-20b", 20_914_757_184, layers=24, experts=32),
    "gpt-oss-120b": _gpt_oss("openai/gpt-oss-120b", 116_829_156_672, layers=36, experts=128),
    "deepseek-v3": Shape(  # without the layers that predict several tokens
        repository="deepseek-ai/DeepSeek-V3",
        family="deepseek_v3",
        config=_decoder(7168, 18432, 61, 128, 128, 160 * _K, 129280)
        | {"q_lora_rank": 1536, "kv_lora_rank": 512, "v_head_dim": 128}
        | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
        | {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1}
        | {"moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4}
        | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
        | _UNTIED,
        parameters=671_026_404_352,
    ),
    "phi-4": Shape(
        repository="microsoft/phi-4",
        family="phi3",
        config=_decoder(5120, 17920, 40, 40, 10, 16 * _K, 100352)
        | {"sliding_window": None, "bos_token_id": 100257, "eos_token_id": 100257}
        | {"pad_token_id": 100257}
        | _UNTIED,
        parameters=14_659_507_200,
    ),
    "lwm-7b": _llama(
        "LargeWorldModel/LWM-Text-Chat-1M",
        *(6_738_415_616, 4096, 11008, 32, 32, 32, 1024 * _K, 32000),
    ),
    "longchat-7b": _llama(  # 4,096 positions, of which a linear scale makes eight times as many
        "lmsys/longchat-7b-v1.5-32k",
        *(6_738_415_616, 4096, 11008, 32, 32, 32, 32 * _K, 32000),
    ),
    "command-r-35b": Shape(  # its positions are in `model_max_length`, see `max_positions`
        repository="CohereForAI/c4ai-command-r-v01",
        family="cohere",
        config=_decoder(8192, 22528, 40, 64, 64, 8192, 256000)
        | {"model_max_length": 128 * _K}
        | _TIED,
        parameters=34_980_831_232,
    ),
}
"""By the name that plans and benchmarks take."""


def shape_of(name: str) -> str | None:
    """The shape that a name means, its own or its repository's, in any case; None for none."""
    wanted = name.lower()
    known = {shape: shape for shape in SHAPES}
    known |= {of.repository.lower(): shape for shape, of in SHAPES.items()}
    return known.get(wanted)


def described(shape: str) -> dict[str, Any]:
    """What makes a shape's cache and weights, read off its configuration.

    `kv_bytes_per_token` are those of one more token of a long prompt, in 16 bits, in the layers
    that see all of it. Latent attention stores one latent of `head_dim` numbers for all heads.
    """
    published, config = SHAPES[shape], config_of(shape)
    layers = DynamicCache(config=config).layers
    sliding = sum(isinstance(layer, DynamicSlidingWindowLayer) for layer in layers)
    heads = config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    stored = 2 * heads * width
    if latent := getattr(config, "kv_lora_rank", None):
        heads, width = 1, latent + config.qk_rope_head_dim
        stored = width
    return {
        "repository": published.repository,
        "parameters": published.parameters,
        "weights": quantization_of(config) or "bfloat16",
        "layers": len(layers),
        "sliding_layers": sliding,
        "sliding_window": config.sliding_window if sliding else None,
        "kv_heads": heads,
        "head_dim": width,
        "kv_bytes_per_token": 2 * stored * (len(layers) - sliding),
        "positions": positions_of(config),
    }


def outline(
    shape: str,
    *,
    dtype: torch.dtype,
    layers: int | None = None,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """A model of a published shape on the meta device, without weights.

    Args:
        shape: a name in `SHAPES`.
        dtype: of the weights.
        layers: fewer layers than the shape has; None for all.
        attn_implementation: as transformers names it; its own choice by default.

    Raises:
        InvalidArgumentError: an unknown shape.
    """
    config = config_of(shape, layers)
    options = {"attn_implementation": attn_implementation, "dtype": dtype}
    with torch.device("meta"):
        made: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options)
    return made


def config_of(shape: str, layers: int | None = None) -> Any:
    """The configuration of a published shape; arguments and errors as in `outline`."""
    if shape not in SHAPES:
        raise InvalidArgumentError(
            f"shape: expected one of {', '.join(SHAPES)}, got {shape!r}{nearest(shape, SHAPES)}"
        )
    changes = {} if layers is None else {"num_hidden_layers": layers}
    return AutoConfig.for_model(SHAPES[shape].family, **SHAPES[shape].config | changes)
