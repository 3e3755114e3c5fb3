"""Published models by name, for plans and benchmarks, from their `config.json`.

`shapes.toml` repeats them, positions included; `tests/plan/test_shapes.py` builds each model from
its configuration and compares.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from snapkv.errors import InvalidArgumentError
from snapkv.hf.build import grows
from snapkv.plan.footprint import positions_of, quantization_of
from snapkv.validation import nearest


@dataclass(frozen=True)
class Shape:
    """The published shape of a model."""

    repository: str
    family: str
    parameters: int
    config: dict[str, Any]


def _published() -> Iterator[tuple[str, Shape]]:
    text = resources.files("snapkv.plan").joinpath("shapes.toml").read_text(encoding="utf-8")
    for name, said in tomllib.loads(text).items():
        repository, family, parameters = map(said.pop, ("repository", "model_type", "parameters"))
        said.pop("source", None)
        config = {key: None if value == "null" else value for key, value in said.items()}
        yield name, Shape(repository, family, parameters, config)


SHAPES: dict[str, Shape] = dict(_published())
"""All shapes by name."""


def shape_of(name: str) -> str | None:
    """The shape of a name or repository, ignoring case; None if unknown."""
    known = {shape: shape for shape in SHAPES}
    known |= {of.repository.lower(): shape for shape, of in SHAPES.items()}
    return known.get(name.lower())


def described(shape: str) -> dict[str, Any]:
    """Sizes of a shape's cache and weights; `kv_bytes_per_token` in 16 bits, for long prompts.

    Latent attention stores one latent of `head_dim` numbers for all heads.
    """
    published, config = SHAPES[shape], config_of(shape)
    layers = DynamicCache(config=config).layers
    growing = sum(map(grows, layers))
    sliding = [layer for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)]
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
        "growing_layers": growing,
        "sliding_layers": len(sliding),
        "sliding_window": sliding[0].sliding_window if sliding else None,
        "kv_heads": heads,
        "head_dim": width,
        "kv_bytes_per_token": 2 * stored * growing,
        "positions": positions_of(config),
    }


def outline(
    shape: str,
    *,
    dtype: torch.dtype,
    layers: int | None = None,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """A model of a published shape on the meta device, without weights."""
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
