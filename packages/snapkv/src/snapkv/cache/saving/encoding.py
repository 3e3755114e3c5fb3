"""Converting the layers of a cache to tensors and JSON, and back.

A compressed layer is saved part by part, each under the names of its fields, so these names belong
to the file format. Loading a file runs no code from it: the file can only name kinds of stores and
a few kinds of records.
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
from snapkv.errors import CacheFileError, CacheMismatchError, wrong
from snapkv.storage.bits import KVCodes
from snapkv.storage.coded import CodedStates, decode_state, quantize_state
from snapkv.storage.ragged import RaggedStates

COMPRESSED = "compressed"
"""The kind of a compressed layer; the kind of another layer is its class in transformers."""

_KEYS_AND_VALUES = ("keys", "values")

_RECORDS: dict[str, Any] = {
    kind.__name__: kind for kind in (RaggedStates, CodedStates, ops.Codes, KVCodes)
}


def encode_layer(
    layer: Any, name: str, tensors: dict[str, Tensor], codes: KVCodes | None = None
) -> dict[str, Any]:
    """Convert a layer to JSON and tensors.

    Of a layer that is not compressed, only attributes that are tensors, numbers, texts, None, or
    dictionaries of these are saved. The others are left out.

    Args:
        layer: the layer of the cache.
        name: the beginning of the names of its tensors.
        tensors: the tensors of the file by name, to which those of the layer are added in place.
            They are the layer's own tensors and not copies, unless they are quantized.
        codes: the quantized form in which the keys and values of a compressed layer are saved; None
            to save them as they are. Keys and values that are quantized already, and the tail of a
            ragged store, are saved as they are in any case.

    Returns:
        The kind and the parts of the layer, for `decode_layer`.

    Raises:
        InvalidArgumentError: `codes` is given, and a key or value is not finite or too large for
            them.
    """
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
        parts["store"] = quantize_state(parts["store"], codes)
        if "offloaded" in parts:
            both = dict(zip(_KEYS_AND_VALUES, parts["offloaded"], strict=True))
            parts["offloaded"] = quantize_state(both, codes)
    others = layer.other_states
    return {
        "kind": COMPRESSED,
        "store_kind": layer.store.kind,
        "recall_due": layer.offloaded.is_due,
        **_encode(parts, name, tensors),
        **({"beside": _encode(_saveable(others), name, tensors)} if others else {}),
    }


def decode_layer(
    layer: Any, saved: dict[str, Any], tensors: dict[str, Tensor], device: torch.device
) -> None:
    """Fill an empty layer with the tokens and states that `encode_layer` has converted.

    Args:
        layer: the layer, which changes in place.
        saved: the JSON that `encode_layer` returned.
        tensors: the tensors of the file by name.
        device: where the layer's tensors are put. Offloaded tokens stay on the CPU.

    Raises:
        CacheMismatchError: the file has a layer of another kind in this place.
        CacheFileError: the file has attributes that this layer does not have.
        ValueError: the parts of the layer do not fit together.
    """
    own = COMPRESSED if isinstance(layer, CompressedLayer) else type(layer).__name__
    if saved["kind"] != own:
        raise wrong(
            "model",
            f"expected a layer of type {saved['kind']}, as in the saved cache, but got {own}",
            "Load the cache with the same version of transformers that was used to save it",
            CacheMismatchError,
        )

    def on_device(part: Any) -> Any:
        return decode(part, lambda name: tensors[name].to(device))

    if not isinstance(layer, CompressedLayer):
        _fill_other(layer, on_device(saved["state"]), device)
        return
    _fill_other(layer, on_device(saved.get("beside", {})), device)
    offloaded = decode(saved.get("offloaded"), tensors.__getitem__)
    if isinstance(offloaded, dict):
        offloaded = tuple(decode_state(offloaded)[name] for name in _KEYS_AND_VALUES)
    if offloaded is not None:
        layer.offloaded.append(*offloaded, on=device)
    layer.offloaded.is_due = saved["recall_due"]
    slots = on_device(saved["slots"])
    slots.pop("is_partial", None)  # written by 0.3.0; `chosen_at` says the same
    notes = on_device(saved["notes"])
    layer.queries.held = notes.pop("last_queries")
    layer.state = layer.state.restored(notes)
    store = decode_state(on_device(saved["store"]))
    restore(layer, saved["store_kind"], store, SlotMap.restored(slots))
    _require_fitting(layer)


def _require_fitting(layer: CompressedLayer) -> None:
    """Raise if the keys, the values and the slots of a layer have sizes that do not fit together.

    Raises:
        ValueError: the sizes do not fit together.
    """
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
            f"the sizes of keys, values and slots of layer {layer.identity.layer_idx} do not fit "
            "together"
        )


def _fill_other(layer: Any, state: dict[str, Any], device: torch.device) -> None:
    """Set the attributes of a cache layer that is a class of transformers.

    Args:
        layer: the layer, which changes in place.
        state: its attributes by name.
        device: where the tensors are.

    Raises:
        CacheFileError: the layer does not have such an attribute.
    """
    if unknown := state.keys() - vars(layer).keys():
        raise wrong(
            "path",
            f"the file has values for {', '.join(sorted(unknown))}, which a "
            f"{type(layer).__name__} of the installed transformers does not have",
            "Load the cache with the same version of transformers that was used to save it",
            CacheFileError,
        )
    vars(layer).update(state)
    for held in state.values():
        for part in held.values() if isinstance(held, dict) else (held,):
            if isinstance(part, Tensor) and part.is_floating_point():
                layer.dtype, layer.device = part.dtype, device


def _saveable(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if _is_saveable(value)}


def _is_saveable(value: Any) -> bool:
    """Return whether the value of an attribute can be written to a file.

    Devices and dtypes, for example, cannot be written. They follow from the tensors.
    """
    if isinstance(value, dict):
        return all(_is_saveable(part) for part in value.values())
    return value is None or isinstance(value, Tensor | bool | int | float | str)


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Convert a value to JSON, with the name of a tensor in the place of each tensor.

    Args:
        value: tensors, records, dictionaries, lists, tuples and what JSON has.
        name: the name of the value, which begins the names of its tensors.
        tensors: tensors by name, to which those in the value are added.
    """
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
    """Convert JSON back to the value that was encoded, with tuples for lists and tuples.

    Args:
        value: the JSON.
        tensor: returns the tensor with a given name.
    """
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
