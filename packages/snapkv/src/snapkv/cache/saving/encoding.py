"""The layers of a cache as tensors and JSON, and back; keys and values in few bits where asked.

A compressed layer is saved as its parts, each by the names of its fields, which are public.
Nothing in a file is run: it names kinds of stores and a few kinds of records.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from snapkv import ops
from snapkv.cache.layer import CompressedLayer
from snapkv.cache.restoring import restore
from snapkv.cache.slots import SlotMap
from snapkv.errors import CacheFileError, CacheMismatchError
from snapkv.storage.bits import KVCodes
from snapkv.storage.coded import CodedStates, state_in_codes, state_spread
from snapkv.storage.ragged import RaggedStates

COMPRESSED = "compressed"
"""Kind of a compressed layer; other layers have the name of transformers' class."""

_BOTH = ("keys", "values")

_RECORDS: dict[str, Any] = {
    kind.__name__: kind for kind in (RaggedStates, CodedStates, ops.Codes, KVCodes)
}


def encode_layer(
    layer: Any, name: str, tensors: dict[str, Tensor], codes: KVCodes | None = None
) -> dict[str, Any]:
    """A layer's kind and parts as JSON; its tensors are added to `tensors`, in codes if asked."""
    if not isinstance(layer, CompressedLayer):
        state = _saveable(vars(layer))
        return {"kind": type(layer).__name__, **_encode({"state": state}, name, tensors)}
    parts: dict[str, Any] = {
        "store": layer.store.state(),
        "slots": layer.slots.state(),
        "notes": {**layer.state.state(), "last_queries": layer.queries.held},
    }
    if layer.offloaded.held_bytes:
        parts["offloaded"] = layer.offloaded.on_host()
    if codes is not None:
        parts["store"] = state_in_codes(parts["store"], codes)
        if "offloaded" in parts:
            both = dict(zip(_BOTH, parts["offloaded"], strict=True))
            parts["offloaded"] = state_in_codes(both, codes)
    others = layer.other_states
    return {
        "kind": COMPRESSED,
        "store_kind": layer.store.kind,
        "recall_due": layer.recall_due,
        **_encode(parts, name, tensors),
        **({"beside": _encode(_saveable(others), name, tensors)} if others else {}),
    }


def decode_layer(
    layer: Any, saved: dict[str, Any], tensors: dict[str, Tensor], device: torch.device
) -> None:
    """Fill a layer that has just been made.

    Raises:
        CacheMismatchError: the file has a layer of another kind in its place.
        CacheFileError: parts that this layer does not have.
    """
    own = COMPRESSED if isinstance(layer, CompressedLayer) else type(layer).__name__
    if saved["kind"] != own:
        raise CacheMismatchError(
            f"model: expected a layer of the kind {saved['kind']}, as the cache has, got {own}; "
            "load it with the release of transformers that saved it"
        )

    def on_device(part: Any) -> Any:
        return decode(part, lambda name: tensors[name].to(device))

    if not isinstance(layer, CompressedLayer):
        _fill_other(layer, on_device(saved["state"]), device)
        return
    _fill_other(layer, on_device(saved.get("beside", {})), device)
    offloaded = decode(saved.get("offloaded"), tensors.__getitem__)
    if isinstance(offloaded, dict):
        offloaded = tuple(state_spread(offloaded)[name] for name in _BOTH)
    if offloaded is not None:
        layer.offloaded.append(*offloaded, on=device)
    layer.offloaded.is_due = saved["recall_due"]
    slots = on_device(saved["slots"])
    slots.pop("is_partial", None)  # written by 0.3.0; `chosen_at` says the same
    notes = on_device(saved["notes"])
    layer.queries.held = notes.pop("last_queries")
    layer.state = layer.state.restored(notes)
    store = state_spread(on_device(saved["store"]))
    restore(layer, saved["store_kind"], store, SlotMap.restored(slots))
    _require_fitting(layer)


def _require_fitting(layer: CompressedLayer) -> None:
    """Refuse parts that are no tensors of one batch, or do not say what is in the slots."""
    store, slots = layer.store, layer.slots
    keys, values, kept = store.keys, store.values, slots.kept
    numbers = (slots.start, slots.chosen_at, slots.removed_tokens, store.num_kv_heads)
    tensors = [*slots.tensors.values(), *layer.state.tensors.values()]
    tensors += [] if layer.queries.held is None else [layer.queries.held]
    fits = all(type(number) is int and number >= 0 for number in numbers)
    if not store.is_filled:
        fits = fits and not tensors and not slots.start
    else:
        fits = (
            fits
            and keys.ndim == values.ndim == 4
            and keys.shape[:3] == values.shape[:3]
            and store.num_kv_heads > 0
            and keys.shape[1] % store.num_kv_heads == 0
            and all(len(tensor) == len(keys) for tensor in tensors)
            and (kept is not None or not slots.start)
            and (slots.removed_spans is None or slots.removed_spans.shape[2:] == (2,))
        )
        if kept is not None:
            fits = fits and kept.shape[:2] == keys.shape[:2] and kept.shape[2] <= store.slots
    if not fits:
        raise ValueError(
            f"layer {layer.identity.layer_idx}: keys, values and slots of different sizes"
        )


def _fill_other(layer: Any, state: dict[str, Any], device: torch.device) -> None:
    """Fill a layer of transformers' own."""
    if unknown := state.keys() - vars(layer).keys():
        raise CacheFileError(
            f"path: expected what a {type(layer).__name__} of this transformers has, got "
            f"{', '.join(sorted(unknown))}; load it with the release of transformers that saved it"
        )
    vars(layer).update(state)
    for held in state.values():
        for part in held.values() if isinstance(held, dict) else (held,):
            if isinstance(part, Tensor) and part.is_floating_point():
                layer.dtype, layer.device = part.dtype, device


def _saveable(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if _is_saveable(value)}


def _is_saveable(value: Any) -> bool:
    """Whether an attribute of transformers' own layers says what they hold, or only where."""
    if isinstance(value, dict):
        return all(_is_saveable(part) for part in value.values())
    return value is None or isinstance(value, Tensor | bool | int | float | str)


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON; where a tensor is, its name."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _encode(part, f"{name}.{key}", tensors) for key, part in value.items()}
    if isinstance(value, dict):
        pairs = [[key, _encode(part, f"{name}.{key}", tensors)] for key, part in value.items()]
        return {"dict": pairs}
    if isinstance(value, list | tuple):
        return [_encode(part, f"{name}.{place}", tensors) for place, part in enumerate(value)]
    if type(value) in _RECORDS.values():
        parts = {part.name: getattr(value, part.name) for part in fields(value)}
        return {"record": type(value).__name__, "parts": _encode(parts, name, tensors)}
    return value


def decode(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """What was encoded; sequences come back as tuples."""
    if isinstance(value, list):
        return tuple(decode(part, tensor) for part in value)
    if not isinstance(value, dict):
        return value
    if value.keys() == {"tensor"}:
        return tensor(value["tensor"])
    if value.keys() == {"dict"}:
        return {key: decode(part, tensor) for key, part in value["dict"]}
    if value.keys() == {"record", "parts"}:
        return _RECORDS[value["record"]](**decode(value["parts"], tensor))
    return {key: decode(part, tensor) for key, part in value.items()}
