"""What a model takes, read off its outline: the model on the meta device, without weights."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from snapkv.cache.report import tensor_bytes
from snapkv.errors import UnsupportedModelError
from snapkv.plan.weights import quantization_of, stored_bytes
from snapkv.validation import first_line


@dataclass(frozen=True, kw_only=True)
class SlidingLayer:
    """A layer that stores the last tokens only, compressed or not.

    Attributes:
        token_bytes: keys and values of one token.
        most_tokens: stored between two passes.
    """

    token_bytes: int
    most_tokens: int


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes and floating point operations of a model, for any prompt.

    Attributes:
        weights_bytes: all parameters, shared ones once, as the checkpoint stores them.
        embedding_bytes: of the input embedding, of which a step reads one row; 0 where the output
            projection shares it.
        expert_bytes: of the parameters in `experts`, experts of a mixture together.
        experts: experts per layer; 0 where there is no mixture.
        experts_per_token: how many of them a token visits.
        full_layers: bytes of one token in every layer of full attention; these are compressed.
        sliding_layers: layers of sliding attention; these stay as they are.
        state_bytes: what other layers hold, whatever the length of the prompt.
        mlp_token_bytes: activations of one prompt token at the widest point of an MLP.
        attention_token_bytes: activations of one prompt token around attention.
        hidden_token_bytes: one token between two layers.
        pair_flops: operations of attention for one pair of query and key, full layers together.
        token_flops: operations of all matrices for one token.
        max_positions: of the model; None where there is no limit.
        dtype: of the cache, and of weights that are not quantized.
        quantization: how the checkpoint stores weights; None for in `dtype`. Whether they are
            counted so says `snapkv.plan.weights.is_counted`.
    """

    weights_bytes: int
    embedding_bytes: int
    expert_bytes: int
    experts: int
    experts_per_token: int
    full_layers: tuple[int, ...]
    sliding_layers: tuple[SlidingLayer, ...]
    state_bytes: int
    mlp_token_bytes: int
    attention_token_bytes: int
    hidden_token_bytes: int
    pair_flops: int
    token_flops: int
    max_positions: int | None
    dtype: str
    quantization: str | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes that every stored token takes in the layers of full attention together."""
        return sum(self.full_layers)

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of one token in the layer where it takes most."""
        layers = (*self.full_layers, *(layer.token_bytes for layer in self.sliding_layers))
        return max(layers, default=0)

    def cache_bytes(self, stored_tokens: int, seen_tokens: int) -> int:
        """Bytes of one request's cache.

        Args:
            stored_tokens: in every layer of full attention.
            seen_tokens: prompt and answer; a sliding layer stores up to its window of them.
        """
        sliding = self.sliding_bytes(seen_tokens)
        return self.token_bytes * stored_tokens + sliding + self.state_bytes

    def sliding_bytes(self, seen_tokens: int, behind: int = 0) -> int:
        """Bytes that the layers of sliding attention hold.

        Args:
            seen_tokens: prompt and answer so far.
            behind: tokens that a layer still holds of those its window has left, since it keeps
                the last of all that were in its last pass.
        """
        return sum(
            layer.token_bytes * min(layer.most_tokens + behind, seen_tokens)
            for layer in self.sliding_layers
        )

    def read_bytes(self, batch: int) -> int:
        """Bytes of weights that a step reads which generates one token for each of a batch.

        Of a mixture the experts that the batch is expected to visit, if each token visits any of
        them as likely as the others.
        """
        read = self.weights_bytes - self.embedding_bytes
        if not self.experts:
            return read
        unvisited = (1 - self.experts_per_token / self.experts) ** batch
        return read - int(self.expert_bytes * unvisited)

    def prompt_flops(self, tokens: int) -> int:
        """Operations of reading a prompt; attention is causal, so half of all pairs count."""
        return self.token_flops * tokens + self.pair_flops * tokens**2 // 2


def footprint_of(outline: PreTrainedModel) -> Footprint:
    """What a model takes, from one token sent through its outline on the meta device.

    That token makes a cache of real shapes without data, so grouped heads, latent attention,
    sliding windows and values of another width than the keys count as they are stored.

    Args:
        outline: the model on the meta device, in its dtype.

    Raises:
        UnsupportedModelError: the model does not run on the meta device.
    """
    config = outline.config.get_text_config(decoder=True)
    layers = _cache_of_one_token(outline)
    full = [layer for layer in layers if type(layer).__name__ == "DynamicLayer"]
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
        full_layers=tuple(tensor_bytes(layer) for layer in full),
        sliding_layers=tuple(
            SlidingLayer(token_bytes=tensor_bytes(layer), most_tokens=layer.sliding_window - 1)
            for layer in sliding
        ),
        state_bytes=sum(tensor_bytes(layer) for layer in others),
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
    """What a model takes that is loaded; errors as in `footprint_of`."""
    make, config = type(model)._from_config, copy.deepcopy(model.config)
    try:
        with torch.device("meta"):
            outline = make(config, dtype=model.dtype, attn_implementation="eager")
    except (AttributeError, ImportError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"model: expected one that can be made without weights, got {type(config).__name__}: "
            f"{error}; load it, and look at cache.report() after a prompt"
        ) from error
    return footprint_of(outline)


def max_positions(model: Any) -> int | None:
    """Positions the model has for prompt and answer together; None where there is no limit."""
    return positions_of(model.config)


def positions_of(config: Any) -> int | None:
    """The same, of a configuration.

    Cohere's models say in `model_max_length` how far they were trained, and in
    `max_position_embeddings` less.
    """
    text = config.get_text_config(decoder=True)
    return _first(text, "model_max_length", "max_position_embeddings")


def _cache_of_one_token(outline: PreTrainedModel) -> list[Any]:
    cache = DynamicCache(config=outline.config)
    ids = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    if getattr(outline.config, "_experts_implementation", None):
        outline.set_experts_implementation("batched_mm")  # the others look at data, or at dtypes
    try:
        with torch.no_grad():
            outline(ids, past_key_values=cache, logits_to_keep=1)
    except (NotImplementedError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"model: expected one whose layers run without weights, got {type(outline).__name__}: "
            f"{first_line(error)}; load it, and look at cache.report() after a prompt"
        ) from error
    return list(cache.layers)


def _mlp_width(config: Any, experts: int, chosen: int) -> int:
    """How wide a token is inside an MLP, or inside the experts that it visits."""
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    of_expert = getattr(config, "moe_intermediate_size", None)
    if not experts:
        return int(width)
    return max(int(of_expert or width) * chosen, int(width) if of_expert else 0)


def _is_latent(config: Any) -> bool:
    """Whether keys and values come out of one latent, per head only while attention runs."""
    return getattr(config, "kv_lora_rank", None) is not None


def _state_width(config: Any) -> int:
    """Numbers of one token's queries and attention's output, or its keys and values, all heads."""
    heads = int(config.num_attention_heads)
    if _is_latent(config):
        return heads * int(config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    return 2 * heads * int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def _first(config: Any, *names: str) -> int | None:
    """The first of some settings that the configuration has."""
    return next((value for name in names if (value := getattr(config, name, None))), None)
