"""The memory and operations of a model, from its outline on the meta device."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from snapkv.cache.report import tensor_bytes, token_bytes
from snapkv.errors import UnsupportedModelError
from snapkv.hf.build import grows, layers_for, plain_layers
from snapkv.hf.cache_argument import passed
from snapkv.policies import FullCache
from snapkv.validation import first_line

_PER_BLOCK, _BLOCK_BYTES = 32, 17
"""mxfp4 stores 32 numbers in four bits each and their common scale in eight (OCP Microscaling
Formats, section 5)."""

_SCALE_BYTES = 4
"""A block of fp8 has a scale in float32."""


@dataclass(frozen=True, kw_only=True)
class SlidingLayer:
    """A sliding layer: it stores the last tokens only, compressed or not."""

    token_bytes: int
    most_tokens: int  # tokens stored between passes


@dataclass(frozen=True, kw_only=True)
class FullLayer:
    """A full-attention layer, which is compressed; sizes of one stored token."""

    token_bytes: int
    heads: int
    key_width: int  # of one head
    value_width: int

    @classmethod
    def of(cls, layer: Any) -> Self:
        """Read from a cache's layer with one token in it."""
        return cls(
            token_bytes=token_bytes(layer),
            heads=layer.keys.shape[1],
            key_width=layer.keys.shape[-1],
            value_width=layer.values.shape[-1],
        )


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes and floating-point operations of a model, for any prompt."""

    weights_bytes: int  # as in the checkpoint; shared weights count once
    embedding_bytes: int  # a step reads one row of it; 0 if shared with the output projection
    expert_bytes: int
    experts: int  # per layer; 0 without experts
    experts_per_token: int
    full_layers: tuple[FullLayer, ...]
    sliding_layers: tuple[SlidingLayer, ...]
    other_layers: int  # layers with a state, or that share another layer's cache
    state_bytes: int  # fixed-size states of these and of the compressed layers
    mlp_token_bytes: int  # activations of a prompt token at the widest point of an MLP
    attention_token_bytes: int  # and at attention
    hidden_token_bytes: int  # hidden state of one token
    pair_flops: int  # attention of one query-key pair, sum over full layers
    token_flops: int  # all matrices for one token
    max_positions: int | None
    dtype: str
    quantization: str | None = None  # of the checkpoint's weights; None if stored in `dtype`

    @property
    def token_bytes(self) -> int:
        """Bytes of a stored token, sum over the full-attention layers."""
        return sum(layer.token_bytes for layer in self.full_layers)

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of one token in the largest layer."""
        layers: list[FullLayer | SlidingLayer] = [*self.full_layers, *self.sliding_layers]
        return max((layer.token_bytes for layer in layers), default=0)

    def cache_bytes(self, stored_tokens: int, seen_tokens: int) -> int:
        """Bytes of one request's cache with that many tokens stored in full-attention layers."""
        return self.token_bytes * stored_tokens + self.other_bytes(seen_tokens)

    def other_bytes(self, seen_tokens: int, behind: int = 0) -> int:
        """Bytes of one request's uncompressed layers; arguments as in `sliding_bytes`."""
        return self.sliding_bytes(seen_tokens, behind) + self.state_bytes

    @property
    def layers(self) -> int:
        """All layers, also those that share another layer's cache."""
        return len(self.full_layers) + len(self.sliding_layers) + self.other_layers

    def sliding_bytes(self, seen_tokens: int, behind: int = 0) -> int:
        """Bytes of the sliding layers, with that many tokens beyond the window."""
        return sum(
            layer.token_bytes * min(layer.most_tokens + behind, seen_tokens)
            for layer in self.sliding_layers
        )

    def read_bytes(self, batch: int) -> int:
        """Bytes of weights that a step reads; of experts, those that a batch likely visits."""
        read = self.weights_bytes - self.embedding_bytes
        if not self.experts:
            return read
        unvisited = (1 - self.experts_per_token / self.experts) ** batch
        return read - int(self.expert_bytes * unvisited)

    def prompt_flops(self, tokens: int) -> int:
        """Operations of a prefill; attention is causal, so half of all pairs count."""
        return self.token_flops * tokens + self.pair_flops * tokens**2 // 2


def footprint_of(outline: PreTrainedModel) -> Footprint:
    """The footprint of a model, from one token sent through its outline on the meta device.

    That gives a cache with real shapes and no data, so that grouped heads, latents, sliding windows
    and values wider or narrower than keys count as stored.

    Raises:
        UnsupportedModelError: the model cannot be compressed, or does not run without weights.
    """
    layers_for(outline, FullCache())
    config = outline.config.get_text_config(decoder=True)
    layers = _cache_of_one_token(outline)
    full = [layer for layer in layers if grows(layer)]
    sliding = [layer for layer in layers if type(layer).__name__ == "DynamicSlidingWindowLayer"]
    others = [layer for layer in layers if layer not in full and layer not in sliding]
    size = outline.dtype.itemsize
    experts = _first(config, "num_local_experts", "num_experts", "n_routed_experts") or 0
    chosen = _first(config, "num_experts_per_tok", "num_experts_per_token") or experts
    stored = stored_bytes(outline)
    of_experts = {name for name in stored if ".experts." in name}
    expert_bytes = sum(stored[name] for name in of_experts)
    embedding, head = outline.get_input_embeddings(), outline.get_output_embeddings()
    shared = head is not None and head.weight is embedding.weight
    embedding_bytes = 0 if shared else embedding.weight.nbytes
    numbers = {name: parameter.numel() for name, parameter in outline.named_parameters()}
    idle = sum(numbers[name] for name in of_experts) * (experts - chosen) // (experts or 1)
    used = sum(numbers.values()) - (0 if shared else embedding.weight.numel()) - idle
    hidden, states = config.hidden_size, _state_width(config)
    return Footprint(
        weights_bytes=sum(stored.values()),
        embedding_bytes=embedding_bytes,
        expert_bytes=expert_bytes,
        experts=experts if expert_bytes else 0,
        experts_per_token=chosen,
        full_layers=tuple(map(FullLayer.of, full)),
        sliding_layers=tuple(
            SlidingLayer(token_bytes=tensor_bytes(layer), most_tokens=layer.sliding_window - 1)
            for layer in sliding
        ),
        other_layers=len(others),
        state_bytes=sum(tensor_bytes(layer) for layer in others)
        + sum(tensor_bytes(layer) - token_bytes(layer) for layer in full),
        mlp_token_bytes=(4 * hidden + 3 * _mlp_width(config, experts, chosen)) * size,
        attention_token_bytes=(4 * hidden + states * (2 if _is_latent(config) else 1)) * size,
        hidden_token_bytes=hidden * size,
        pair_flops=2 * states * len(full),
        token_flops=2 * used,
        max_positions=max_positions(outline),
        dtype=str(outline.dtype).removeprefix("torch."),
        quantization=quantization_of(outline.config),
    )


def footprint_of_loaded(model: Any) -> Footprint:
    """The footprint of a loaded model; errors as in `footprint_of`."""
    make, config = type(model)._from_config, copy.deepcopy(model.config)
    try:
        with torch.device("meta"):
            outline = make(config, dtype=model.dtype, attn_implementation="eager")
    except (AttributeError, ImportError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"model: expected one that is built without weights, got {type(config).__name__}: "
            f"{error}; load it, and look at cache.report() after a prompt"
        ) from error
    return footprint_of(outline)


def max_positions(model: Any) -> int | None:
    """Positions for prompt and answer together; None without a limit."""
    return positions_of(model.config)


def positions_of(config: Any) -> int | None:
    """The same from a configuration."""
    text = config.get_text_config(decoder=True)
    return _first(text, "model_max_length", "max_position_embeddings")


def _cache_of_one_token(outline: PreTrainedModel) -> list[Any]:
    cache = DynamicCache(config=outline.config)
    cache.layers = plain_layers(outline)
    ids = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    if getattr(outline.config, "_experts_implementation", None):
        outline.set_experts_implementation("batched_mm")  # the others read data, or compare dtypes
    try:
        with torch.no_grad():
            outline(ids, **passed(cache), logits_to_keep=1)
    except (NotImplementedError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"model: expected a model that runs without weights, got {type(outline).__name__}: "
            f"{first_line(error)}; load it, and look at cache.report() after a prompt"
        ) from error
    return list(cache.layers)


def _mlp_width(config: Any, experts: int, chosen: int) -> int:
    """The inner width of an MLP, or of the experts that a token visits."""
    width = _widest(config, "intermediate_size") or 4 * int(config.hidden_size)
    of_expert = _widest(config, "moe_intermediate_size")
    if not experts:
        return width
    return max((of_expert or width) * chosen, width if of_expert else 0)


def _widest(config: Any, name: str) -> int:
    """The largest value of a setting that may differ by layer; 0 if absent."""
    layers = getattr(config, "per_layer_config", None) or [config]
    found = [getattr(layer, name, None) for layer in layers]
    numbers = [value for each in found for value in (each if isinstance(each, list) else [each])]
    return max((int(number) for number in numbers if number), default=0)


def _is_latent(config: Any) -> bool:
    """Whether keys and values are computed from one latent during attention."""
    return getattr(config, "kv_lora_rank", None) is not None


def _state_width(config: Any) -> int:
    """Count of one token's numbers in queries and attention output, or in keys and values."""
    heads = _widest(config, "num_attention_heads")
    if _is_latent(config):
        return heads * int(config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    return 2 * heads * (_widest(config, "head_dim") or int(config.hidden_size) // heads)


def _first(config: Any, *names: str) -> int | None:
    """The value of the first setting that the configuration has."""
    return next((value for name in names if (value := getattr(config, name, None))), None)


def weights_bytes(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def quantization_of(config: Any) -> str | None:
    """How a checkpoint quantizes its weights: "mxfp4", "fp8", "gptq", ...; None for not."""
    found = _settings(config)
    return None if found is None else str(found.get("quant_method"))


def is_counted(quantization: str | None) -> bool:
    """Whether `stored_bytes` knows the size of such weights; others count in the dtype."""
    return quantization in (None, "mxfp4", "fp8")


def stored_bytes(model: Any) -> dict[str, int]:
    """Bytes of every parameter by name, as the checkpoint stores it.

    mxfp4 quantizes the projections of experts, as in gpt-oss; fp8 also all linear layers except the
    output projection, as in DeepSeek-V3.
    """
    found = _settings(model.config) or {}
    method, block = found.get("quant_method"), found.get("weight_block_size")
    head = model.get_output_embeddings()
    linear = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    sizes = {}
    for name, parameter in model.named_parameters():
        of_expert = ".experts." in name and parameter.ndim == 3
        sizes[name] = parameter.nbytes
        if method == "mxfp4" and of_expert:
            sizes[name] = math.ceil(parameter.numel() / _PER_BLOCK) * _BLOCK_BYTES
        elif method == "fp8" and (of_expert or id(parameter) in linear):
            sizes[name] = parameter.numel() + _scales(parameter.shape, block) * _SCALE_BYTES
    return sizes


def _settings(config: Any) -> dict[str, Any] | None:
    """The configuration's quantization settings as a dictionary."""
    found = getattr(config, "quantization_config", None)
    if found is None or isinstance(found, dict):
        return found
    settings: dict[str, Any] = found.to_dict()
    return settings


def _scales(shape: Sequence[int], block: Sequence[int] | None) -> int:
    """How many scales a weight of that shape has: one per block, or one per matrix."""
    *matrices, rows, columns = shape
    height, width = block or (rows, columns)
    return math.prod(matrices) * math.ceil(rows / height) * math.ceil(columns / width)
