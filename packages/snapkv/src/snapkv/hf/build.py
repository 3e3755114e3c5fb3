"""Choosing which layers of a model are compressed, and refusing models that cannot be."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
)

from snapkv.cache.hybrid import HybridLayer
from snapkv.cache.layer import CompressedLayer, LayerIdentity
from snapkv.errors import UnsupportedModelError, wrong
from snapkv.hf.cache_argument import takes_cache
from snapkv.hf.identity import require_model
from snapkv.hf.model_parts import absent_layers, output_projections, rotations_of
from snapkv.hf.placement import layer_devices
from snapkv.policies import Policy
from snapkv.storage.bits import KVCodes
from snapkv.storage.uncompressed import AbsentLayer, CrossAttentionLayer

_COMPRESSED = {"DynamicLayer", "LinearAttentionAndFullAttentionLayer"}
_KEPT_AS_THEY_ARE = {
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "DummyLayer",
    "CrossAttentionLayer",
}


def grows(layer: Any) -> bool:
    """Return whether a layer of transformers stores every token, so that it is compressed."""
    return type(layer).__name__ in _COMPRESSED


def plain_layers(model: PreTrainedModel) -> list[CacheLayerMixin]:
    """Create the cache layers of transformers for a model, with two corrections.

    transformers mistakes cross attention for full attention, and it makes layers that the
    configuration names although they were pruned from the model.

    Raises:
        InvalidTypeError: `model` is not a transformers model.
        UnsupportedModelError: the model cannot be compressed.
    """
    require_model(model)
    config = model.config.get_text_config(decoder=True)
    _require_decoder(model, config)
    crossed = set(getattr(config, "cross_attention_layers", None) or ())
    layers: list[CacheLayerMixin] = [
        CrossAttentionLayer() if index in crossed else layer
        for index, layer in enumerate(DynamicCache(config=config).layers)
    ]
    attending = [index for index, layer in enumerate(layers) if isinstance(layer, DynamicLayer)]
    for index in absent_layers(model, attending, len(layers)):
        layers[index] = AbsentLayer(index)
    _require_kinds(type(model).__name__, layers)
    return layers


def other_kinds(layers: Sequence[Any]) -> tuple[str, ...]:
    """Return the sorted names of the layer classes that are not plain full attention."""
    return tuple(
        sorted({type(layer).__name__ for layer in layers} - {"DynamicLayer", "AbsentLayer"})
    )


def layers_for(
    model: PreTrainedModel, policy: Policy, codes: KVCodes | None = None
) -> list[CacheLayerMixin]:
    """Return the cache layers for a model, in which those with full attention are compressed.

    Args:
        model: the model.
        policy: selects which tokens the compressed layers keep.
        codes: the quantized form in which they store kept tokens; None for the model's dtype.

    Raises:
        InvalidTypeError: `model` is not a transformers model.
        UnsupportedModelError: the model cannot be compressed, or not with this policy.
    """
    layers = plain_layers(model)
    full = [index for index, layer in enumerate(layers) if grows(layer)]
    shared = _readers(model.config.get_text_config(decoder=True))
    readers = {index: shared.get(index, []) for index in full}
    _require_together(model, readers)
    for identity in _identities(model, policy, readers):
        index = identity.layer_idx
        layers[index] = _compressed(layers[index], policy, identity, codes)
    return layers


def _compressed(
    made: CacheLayerMixin, policy: Policy, identity: LayerIdentity, codes: KVCodes | None
) -> CompressedLayer:
    """Return the compressed layer that replaces `made`, a layer of transformers."""
    if type(made) is DynamicLayer:
        return CompressedLayer(policy, identity, codes)
    return HybridLayer(policy, identity, codes, made)


def _identities(
    model: PreTrainedModel, policy: Policy, readers: dict[int, list[int]]
) -> list[LayerIdentity]:
    """Return the index, the depth and the needed model parts of each compressed layer.

    Args:
        model: the model.
        policy: its `needs` say whether rotations and output projections are looked up.
        readers: for each compressed layer, the indices of the layers that reuse its keys.

    Raises:
        UnsupportedModelError: the model does not have a part that the policy needs.
    """
    full = list(readers)
    rotations = rotations_of(model, full) if "rotation" in policy.needs else {}
    projections = output_projections(model, full) if "output_weight" in policy.needs else {}
    return [
        LayerIdentity(
            layer_idx=index,
            depth=depth,
            num_layers=len(full),
            rotation=rotations.get(index),
            output_projection=projections.get(index),
            readers=len(readers[index]),
        )
        for depth, index in enumerate(full)
    ]


def _readers(config: Any) -> dict[int, list[int]]:
    """Find out which layers reuse the keys and values of other layers.

    Returns:
        For the index of each layer that shares its keys and values, the indices of the layers that
        reuse them. Empty if the model does not share keys and values between layers.
    """
    modes = getattr(config, "kv_sharing_modes", None) or []
    kinds = config.layer_types if modes else []
    read = [index for index, mode in enumerate(modes) if mode == "reuse"]
    return {
        index: [other for other in read if kinds[other] == kinds[index]]
        for index, mode in enumerate(modes)
        if mode == "store"
    }


def _require_together(model: PreTrainedModel, readers: dict[int, list[int]]) -> None:
    """Raise if layers that share keys and values are on different devices.

    A layer that reuses keys is recognized by receiving the same tensor, not a copy of it.

    Raises:
        UnsupportedModelError: `device_map` has put these layers on different devices.
    """
    devices = layer_devices(model)
    for index, others in readers.items():
        places = {str(devices[each]) for each in (index, *others) if each in devices}
        if len(places) > 1:
            raise wrong(
                "model",
                f"layer {index} of {type(model).__name__} and the layers that use the same keys "
                f"must be on the same device, but they are on {', '.join(sorted(places))}",
                f"Use device_map to put the layers {index} to {max(others)} on the same device",
                UnsupportedModelError,
            )


def _require_decoder(model: PreTrainedModel, config: Any) -> None:
    """Raise unless the prompt of the model is in a `DynamicCache` of transformers.

    Raises:
        UnsupportedModelError: the model has an encoder or takes no cache, needs a cache class of
            its own, runs layers several times for each token, or shares keys and values between
            layers in a way that its configuration does not describe.
    """
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise wrong(
            "model",
            f"expected a decoder-only model, but got the encoder-decoder {name}, whose prompt is "
            "read by the encoder and is not in a key-value cache",
            "Use a decoder-only model instead",
            UnsupportedModelError,
        )
    # Base models may pass the cache on in `**kwargs`. An encoder does so, too, and then ignores it
    # if its family also has decoders, which `is_decoder` tells apart.
    takers = [model] if hasattr(config, "is_decoder") else model.modules()
    if not getattr(model, "can_generate", lambda: True)() and not takes_cache(takers):
        raise wrong(
            "model",
            f"expected a decoder-only model, but got {name}, whose forward takes no cache",
            "Use a model that stores its prompt in a key-value cache",
            UnsupportedModelError,
        )
    if not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
        raise wrong(
            "model",
            f"the model {name} does not support the DynamicCache of transformers",
            "Use the cache class that belongs to this model",
            UnsupportedModelError,
        )
    if (loops := getattr(config, "n_recurrent_loops", 1)) > 1:
        # Earlier loops read stored keys past the cache, or store more layers than it was made for.
        raise wrong(
            "model",
            f"the model {name} runs some of its layers {loops} times for each token",
            "Use the default cache of transformers for this model",
            UnsupportedModelError,
        )
    if getattr(config, "num_kv_shared_layers", None) and not _readers(config):
        raise wrong(
            "model",
            f"{config.num_kv_shared_layers} layers of the model {name} do not store their own "
            "keys and values",
            "Use the default cache of transformers for this model",
            UnsupportedModelError,
        )


def _require_kinds(name: str, layers: Sequence[Any]) -> None:
    """Raise unless all layers are of known classes and at least one can be compressed.

    Raises:
        UnsupportedModelError: a layer class is unknown, or no layer has full attention.
    """
    others = other_kinds(layers)
    if unknown := sorted(set(others) - _KEPT_AS_THEY_ARE - _COMPRESSED):
        raise wrong(
            "model",
            f"expected layers of full, sliding or linear attention, but got {name} with "
            f"{', '.join(unknown)}",
            "Use the default cache of transformers for this model",
            UnsupportedModelError,
        )
    if not any(map(grows, layers)):
        raise wrong(
            "model",
            f"expected at least one layer of full attention, but got {name} with "
            f"{', '.join(others) or 'no cache layers'} only, so its cache does not grow with the "
            "prompt",
            "Use the default cache of transformers for this model",
            UnsupportedModelError,
        )
