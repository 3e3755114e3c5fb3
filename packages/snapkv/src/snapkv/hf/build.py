"""Which layers of a model are compressed, and which model is refused."""

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
from snapkv.errors import UnsupportedModelError
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
    """Whether one of transformers' own layers holds every token, so that it is compressed."""
    return type(layer).__name__ in _COMPRESSED


def plain_layers(model: PreTrainedModel) -> list[CacheLayerMixin]:
    """transformers' own choice of layers for a model that can be compressed.

    There are two exceptions. It takes cross attention for full attention, and it counts layers that
    the configuration names and the model does not have.
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
    """Names of the kinds of layers that are not of full attention alone."""
    return tuple(
        sorted({type(layer).__name__ for layer in layers} - {"DynamicLayer", "AbsentLayer"})
    )


def layers_for(
    model: PreTrainedModel, policy: Policy, codes: KVCodes | None = None
) -> list[CacheLayerMixin]:
    """transformers' own choice of layers for the model, the full-attention ones compressed.

    What they keep is held in `codes`, if any.
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
    """The compressed layer in the place of one of transformers'."""
    if type(made) is DynamicLayer:
        return CompressedLayer(policy, identity, codes)
    return HybridLayer(policy, identity, codes, made)


def _identities(
    model: PreTrainedModel, policy: Policy, readers: dict[int, list[int]]
) -> list[LayerIdentity]:
    """Which layers these are, with the parts of the model that the policy needs."""
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
    """Which later layers attend to what a layer stores, by its index, where any do."""
    modes = getattr(config, "kv_sharing_modes", None) or []
    kinds = config.layer_types if modes else []
    read = [index for index, mode in enumerate(modes) if mode == "reuse"]
    return {
        index: [other for other in read if kinds[other] == kinds[index]]
        for index, mode in enumerate(modes)
        if mode == "store"
    }


def _require_together(model: PreTrainedModel, readers: dict[int, list[int]]) -> None:
    """Refuse layers that attend to a copy of another's keys, which does not tell whose they are."""
    devices = layer_devices(model)
    for index, others in readers.items():
        places = {str(devices[each]) for each in (index, *others) if each in devices}
        if len(places) > 1:
            raise UnsupportedModelError(
                f"model: expected layers that share keys and values on one device, got layer "
                f"{index} of {type(model).__name__} and those that attend to its keys on "
                f"{', '.join(sorted(places))}; put layers {index} to {max(others)} on one with "
                "device_map"
            )


def _require_decoder(model: PreTrainedModel, config: Any) -> None:
    """Refuse models whose prompt is not in a cache of transformers' usual kind."""
    name = type(model).__name__
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
    if getattr(config, "num_kv_shared_layers", None) and not _readers(config):
        raise UnsupportedModelError(
            f"model: expected every layer to own its keys and values, got {name} with "
            f"{config.num_kv_shared_layers} layers that share them; use transformers' own cache"
        )


def _require_kinds(name: str, layers: Sequence[Any]) -> None:
    """Refuse layers that cannot be compressed, or left as they are, correctly."""
    others = other_kinds(layers)
    if unknown := sorted(set(others) - _KEPT_AS_THEY_ARE - _COMPRESSED):
        raise UnsupportedModelError(
            f"model: expected layers of full, sliding or linear attention, got {name} with "
            f"{', '.join(unknown)}, which cannot be compressed correctly; use transformers' own "
            "cache for it"
        )
    if not any(map(grows, layers)):
        raise UnsupportedModelError(
            f"model: expected at least one layer of full attention, got {name} with "
            f"{', '.join(others) or 'no cache layers'} only, whose cache does not grow with the "
            "prompt; use transformers' own cache for it"
        )
