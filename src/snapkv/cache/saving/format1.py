"""Caches that were saved before their layers had parts, as they are saved now."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_COMPRESSED = ("CompressedLayer", "StaticCompressedLayer", "QuantisedLayer")


def in_parts(notes: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The notes of such a file, with layers as `snapkv.cache.saving.encoding` takes them."""
    layers = [_layer(saved, tensors) for saved in notes["layers"]]
    return {"turn_start": 0, **notes, "layers": layers}  # the start was not saved at first


def _layer(saved: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    if saved["kind"] not in _COMPRESSED:
        return saved
    state = saved["state"]
    sinks = {} if state["sinks"] is None else state["sinks"]["parts"]
    kind, store = _store(state)
    layer = {
        "kind": "compressed",
        "store_kind": kind,
        "store": store,
        "slots": {
            "start": _start(state, tensors),
            "kept": state["kept"],
            "pads": state["pad_tokens"],
            "fillers": state["filler_tokens"],
            "gaps": state.get("gaps"),
            "chosen_at": state["chosen_at"],
            "is_partial": _is_partial(state),
        },
        "notes": {
            "slot_scores": state["slot_scores"],
            "head_notes": state["head_notes"],
            "token_ids": state["token_ids"],
            "last_queries": state["_query_tail"],
            "sink_keys": sinks.get("keys"),
            "sinks_moved": sinks.get("moved"),
        },
        "recall_due": state["recall_due"],
    }
    return layer | ({"offloaded": saved["parked"]} if "parked" in saved else {})


def _store(state: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The kind of store, and its state."""
    store = {
        "keys": state["keys"],
        "values": state["values"],
        "num_kv_heads": state["_num_kv_heads"],
    }
    if state["ragged"] is not None:
        return "ragged", {"states": state["ragged"], **store}
    if state.get("packed") is not None:
        return "quantized", {"codes": state["packed"], **store}
    return "static" if state.get("fixed") else "dense", store


def _is_partial(state: dict[str, Any]) -> bool:
    """Whether the first prompt was still held to a cap, which was not saved."""
    return state["kept"] is not None and not state["chosen_at"] and not state["recall_due"]


def _start(state: dict[str, Any], tensors: Mapping[str, Tensor]) -> int:
    """Columns before the first token behind the chosen ones; only their total was saved."""
    if state["kept"] is None:
        return 0
    behind = tensors[state["keys"]["tensor"]].shape[2]
    if state["ragged"] is None:
        behind -= tensors[state["kept"]["tensor"]].shape[2]
    if state.get("packed") is not None:
        behind += state["packed"][0]["parts"]["shape"][2]
    return int(state["cumulative_length"] - behind)
