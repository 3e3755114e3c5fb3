"""Models of the shapes that papers measure on, with random weights: speed does not ask for more."""

import functools
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from snapkv.errors import InvalidArgumentError
from snapkv.plan import free_bytes, out_of_memory_explained, weights_advice
from snapkv.suggestions import nearest

_LLAMA_2_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2-135m": (
        "llama",
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
            "tie_word_embeddings": True,
        },
    ),
    "mistral-7b": (
        "mistral",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "sliding_window": None,
        },
    ),
    "llama-3.1-8b": (
        "llama",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
    "lwm-7b": ("llama", _LLAMA_2_7B),
    "longchat-7b": ("llama", _LLAMA_2_7B),
    "mixtral-8x7b": (
        "mixtral",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 32000,
            "sliding_window": None,
        },
    ),
    "command-r-35b": (
        "cohere",
        {
            "hidden_size": 8192,
            "intermediate_size": 22528,
            "num_hidden_layers": 40,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "vocab_size": 256000,
        },
    ),
    "qwen2.5-7b": (
        "qwen2",
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
    ),
}
"""Model type and configuration by name; the published sizes, with 2M positions."""


def outline(
    shape: str,
    *,
    dtype: torch.dtype,
    layers: int | None = None,
    attn_implementation: str = "sdpa",
) -> PreTrainedModel:
    """A model of a published shape on the meta device, without weights; see `random_model`."""
    config = _config(shape, layers)
    options = {"attn_implementation": attn_implementation, "dtype": dtype}
    with torch.device("meta"):
        made: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options)
    return made


def _config(shape: str, layers: int | None) -> Any:
    if shape not in SHAPES:
        raise InvalidArgumentError(
            f"shape: expected one of {', '.join(SHAPES)}, got {shape!r}{nearest(shape, SHAPES)}"
        )
    family, sizes = SHAPES[shape]
    if layers is not None and not 1 <= layers <= sizes["num_hidden_layers"]:
        raise InvalidArgumentError(
            f"layers: expected 1 to the {sizes['num_hidden_layers']} of {shape}, got {layers}; "
            "leave it out for all"
        )
    changes = {} if layers is None else {"num_hidden_layers": layers}
    return AutoConfig.for_model(family, **sizes | changes, max_position_embeddings=2**21)


def random_model(
    shape: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    layers: int | None = None,
    attn_implementation: str = "sdpa",
) -> PreTrainedModel:
    """A model of a published shape whose weights are random.

    Args:
        shape: a name in `SHAPES`.
        device: where the weights are made; nothing is held elsewhere meanwhile.
        dtype: of the weights.
        layers: fewer layers than the shape has, to fit a small machine; None for all.
        attn_implementation: as transformers names it.

    Raises:
        InvalidArgumentError: an unknown shape.
        OutOfMemoryError: the weights do not fit.
    """
    options: dict[str, Any] = {"attn_implementation": attn_implementation, "dtype": dtype}
    bare = outline(shape, layers=layers, **options)
    explain = functools.partial(weights_advice, bare, device, free_bytes(device))
    with out_of_memory_explained(explain), torch.device(device):
        torch.manual_seed(0)
        config = _config(shape, layers)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options)
    return model.eval()
