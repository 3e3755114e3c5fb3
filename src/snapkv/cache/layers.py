"""Which layers of a model are compressed, and which models cannot be."""

import functools
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
)

from snapkv.cache.codes import Bits
from snapkv.cache.layer import CompressedLayer
from snapkv.cache.quantised import QuantisedLayer
from snapkv.cache.static import StaticCompressedLayer
from snapkv.errors import InvalidArgumentError, InvalidTypeError, UnsupportedModelError
from snapkv.policies import Policy
from snapkv.projections import output_projections
from snapkv.rotary import rotations_of

_KEPT_AS_THEY_ARE = ("DynamicSlidingWindowLayer", "LinearAttentionLayer", "DummyLayer")


def require_model(model: Any) -> None:
    """Raise unless it is a transformers model, or stands for one.

    Raises:
        InvalidTypeError: it is not.
    """
    if not hasattr(model, "config") or not hasattr(model, "set_attn_implementation"):
        raise InvalidTypeError(
            f"model: expected a transformers PreTrainedModel, got {type(model).__name__}; load one "
            "with AutoModelForCausalLM.from_pretrained"
        )


def layers_for(
    model: PreTrainedModel,
    policy: Policy,
    slots: int | None = None,
    bits: Bits | None = None,
) -> list[CacheLayerMixin]:
    """transformers' own choice of layers for the model, the full-attention ones compressed.

    Args:
        model: the model.
        policy: what the compressed layers keep.
        slots: size of each layer's buffer for static storage; None for layers that grow.
        bits: of what is kept of a prompt; None for the model's own dtype.

    Raises:
        InvalidTypeError: `model` is not a transformers model.
        InvalidArgumentError: the policy has not been given the tokenizer it needs.
        UnsupportedModelError: an encoder-decoder model, one without full attention, one with a
            kind of layer that is not known to be handled correctly, or one that lacks what the
            policy needs.
    """
    require_model(model)
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"model: expected a decoder-only model, got the encoder-decoder {name}; its prompt is "
            "read by the encoder and is not in a key-value cache"
        )
    if not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
        raise UnsupportedModelError(
            f"model: expected one that works with transformers' DynamicCache, got {name}, which "
            "needs a cache of its own; use that one"
        )
    if getattr(config, "num_kv_shared_layers", None):
        raise UnsupportedModelError(
            f"model: expected every layer to own its keys and values, got {name} with "
            f"{config.num_kv_shared_layers} layers that share them; use transformers' own cache"
        )
    if "tokenizer" in policy.needs:
        raise InvalidArgumentError(
            f"policy: expected a method that knows the tokenizer's special tokens and punctuation, "
            f"got {policy!r} without; pass policy.with_tokenizer(tokenizer)"
        )
    layers: list[CacheLayerMixin] = DynamicCache(config=config).layers
    _require_known(name, layers)
    full = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
    rotations = rotations_of(model, full) if "rotation" in policy.needs else {}
    projections = output_projections(model, full) if "output_weight" in policy.needs else {}
    make: Callable[..., CompressedLayer] = CompressedLayer
    if slots is not None:
        _require_only_full(name, layers)
        make = functools.partial(StaticCompressedLayer, slots=slots)
    if bits is not None:
        make = functools.partial(QuantisedLayer, bits=bits)
    for depth, index in enumerate(full):
        layers[index] = make(
            policy,
            index,
            depth=depth,
            num_layers=len(full),
            rotation=rotations.get(index),
            output_projection=projections.get(index),
        )
    return layers


def _require_only_full(name: str, layers: list[Any]) -> None:
    others = sorted({type(layer).__name__ for layer in layers} - {"DynamicLayer"})
    if others:
        raise UnsupportedModelError(
            f"storage: expected a model of full attention only for storage='static', got {name} "
            f"with {', '.join(others)}; use storage='dynamic'"
        )


def _require_known(name: str, layers: list[Any]) -> None:
    kinds = {type(layer).__name__ for layer in layers}
    unknown = sorted(kinds - {"DynamicLayer", *_KEPT_AS_THEY_ARE})
    if unknown:
        raise UnsupportedModelError(
            f"model: expected layers of full, sliding or linear attention, got {name} with "
            f"{', '.join(unknown)}, which cannot be compressed correctly; use transformers' own "
            "cache for it"
        )
    if "DynamicLayer" not in kinds:
        raise UnsupportedModelError(
            f"model: expected at least one layer of full attention, got {name} with "
            f"{', '.join(sorted(kinds)) or 'no cache layers'} only, whose cache does not grow with "
            "the prompt; use transformers' own cache for it"
        )
