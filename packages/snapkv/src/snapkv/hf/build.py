"""Which layers of a model are compressed, and which model is refused."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
)

from snapkv.cache.hybrid import HybridLayer
from snapkv.cache.layer import CompressedLayer, LayerIdentity
from snapkv.errors import InvalidArgumentError, InvalidTypeError, UnsupportedModelError
from snapkv.hf.model_parts import (
    output_projections,
    rotations_of,
    shares_latent,
)
from snapkv.hf.placement import layer_devices
from snapkv.policies import (
    ByteBudget,
    EvictingPolicy,
    Policy,
    PyramidKV,
)
from snapkv.policies.budget import budget_of
from snapkv.storage.base import Storage
from snapkv.storage.coded import KVCodes, Quantize
from snapkv.storage.dynamic import Dynamic
from snapkv.storage.static import Static
from snapkv.validation import require_choice, require_int

_COMPRESSED = {"DynamicLayer", "LinearAttentionAndFullAttentionLayer"}
_KEPT_AS_THEY_ARE = {
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "DummyLayer",
}


def grows(layer: Any) -> bool:
    """Whether one of transformers' own layers holds every token, so that it is compressed."""
    return type(layer).__name__ in _COMPRESSED


StorageMaker = Callable[[], Storage]
"""Makes the storage of one layer."""


def require_model(model: Any) -> None:
    """Raise unless it is a transformers model, or stands for one."""
    if not hasattr(model, "config") or not hasattr(model, "set_attn_implementation"):
        raise InvalidTypeError(
            f"model: expected a transformers PreTrainedModel, got {type(model).__name__}; load one "
            "with AutoModelForCausalLM.from_pretrained"
        )


def layers_for(
    model: PreTrainedModel, policy: Policy, storage: StorageMaker = Dynamic
) -> list[CacheLayerMixin]:
    """transformers' own choice of layers for the model, the full-attention ones compressed."""
    require_model(model)
    config = model.config.get_text_config(decoder=True)
    _require_decoder(model, config)
    if "tokenizer" in policy.needs:
        raise InvalidArgumentError(
            f"policy: expected a method that knows the tokenizer's special tokens and punctuation, "
            f"got {policy!r} without; pass policy.with_tokenizer(tokenizer)"
        )
    layers: list[CacheLayerMixin] = DynamicCache(config=config).layers
    full = [index for index, layer in enumerate(layers) if grows(layer)]
    latents = shares_latent(model)
    made = [storage().at(depth, len(full)) for depth in range(len(full))]
    if latents and any(each.codes is not None for each in made):
        raise UnsupportedModelError(
            f"quantize: expected none for latent attention, whose heads share what is stored, got "
            f"it for {type(model).__name__}; leave it out"
        )
    is_static = any(each.is_compileable for each in made)
    readers = {index: _readers(config).get(index, []) for index in full}
    _require_together(model, readers)
    _require_kinds(type(model).__name__, layers, is_static=is_static)
    for identity, own in zip(_identities(model, policy, readers), made, strict=True):
        index = identity.layer_idx
        layers[index] = _compressed(layers[index], policy, identity, own)
    return layers


def _compressed(
    made: CacheLayerMixin, policy: Policy, identity: LayerIdentity, storage: Storage
) -> CompressedLayer:
    """The compressed layer in the place of one of transformers'."""
    if type(made) is DynamicLayer:
        return CompressedLayer(policy, identity, storage)
    return HybridLayer(policy, identity, storage, made)


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


def storage_for(
    policy: Policy, storage: str, room_tokens: int, quantize: Quantize | None
) -> StorageMaker:
    """How the storage of each layer is made."""
    require_choice("storage", storage, ("dynamic", "static"))
    require_int("room_tokens", room_tokens, minimum=1)
    evicts = isinstance(policy, EvictingPolicy)
    alike = policy.most_tokens is not None and policy.most_tokens == getattr(policy, "budget", None)
    if storage == "static" and (not alike or evicts or policy.parts_groups):
        raise InvalidArgumentError(
            f"storage: expected a policy that keeps a budget of tokens, the same in all layers, "
            f"one set per KV head, and all behind it for storage='static', whose layers share one "
            f"mask, got {policy!r}; use SnapKV(budget=...) with a number, or storage='dynamic'"
        )
    codes = None if quantize is None else KVCodes.of(quantize)
    if codes is not None:
        _require_codes(policy, codes)
    if storage == "static":
        assert policy.most_tokens is not None
        slots = policy.most_tokens + room_tokens
        return functools.partial(Static, slots=slots, room_tokens=room_tokens, codes=codes)
    return functools.partial(Dynamic, in_place=not evicts, codes=codes)  # evicting moves it all


def _require_codes(policy: Policy, codes: KVCodes) -> None:
    """Refuse bits for what a policy holds otherwise, or cannot share out."""
    if isinstance(policy, EvictingPolicy):
        raise InvalidArgumentError(
            f"quantize: expected a policy that only compresses prompts, got {policy.name}; "
            "leave quantize out"
        )
    inner = policy
    while hasattr(inner, "policy"):
        inner = inner.policy
    in_bytes = isinstance(budget_of(policy), ByteBudget)
    shared = isinstance(inner, PyramidKV) or "all_layers" in policy.needs
    if in_bytes and shared and codes.exact_layers:
        raise InvalidArgumentError(
            f"quantize: expected layers that all hold tokens in as many bits where {policy.name} "
            f"shares bytes out among them, got {codes!r}; pass a number of tokens, 'int4', or no "
            "exact_layers"
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


def _require_kinds(name: str, layers: Sequence[Any], *, is_static: bool) -> None:
    """Refuse layers that cannot be compressed, or left as they are, correctly."""
    others = {type(layer).__name__ for layer in layers} - {"DynamicLayer"}
    if unknown := sorted(others - _KEPT_AS_THEY_ARE - _COMPRESSED):
        raise UnsupportedModelError(
            f"model: expected layers of full, sliding or linear attention, got {name} with "
            f"{', '.join(unknown)}, which cannot be compressed correctly; use transformers' own "
            "cache for it"
        )
    if not any(map(grows, layers)):
        raise UnsupportedModelError(
            f"model: expected at least one layer of full attention, got {name} with "
            f"{', '.join(sorted(others)) or 'no cache layers'} only, whose cache does not grow "
            "with the prompt; use transformers' own cache for it"
        )
    if others and is_static:
        raise UnsupportedModelError(
            f"storage: expected a model of full attention only for storage='static', got {name} "
            f"with {', '.join(sorted(others))}; use storage='dynamic'"
        )
