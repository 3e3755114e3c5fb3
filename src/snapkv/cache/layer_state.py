"""All that a compressed layer knows of its tokens, by name; what is off the device left out."""

from typing import Any

from torch import Tensor

from snapkv.cache.layer import CompressedLayer
from snapkv.cache.quantised import QuantisedLayer
from snapkv.cache.static import StaticCompressedLayer

_NAMES = (
    "keys",
    "values",
    "cumulative_length",
    "is_initialized",
    "kept",
    "pad_tokens",
    "filler_tokens",
    "gaps",
    "hides_more_than_padding",
    "ragged",
    "slot_scores",
    "head_notes",
    "token_ids",
    "sinks",
    "recall_due",
    "chosen_at",
    "_query_tail",
    "_num_kv_heads",
)


def state_of(layer: CompressedLayer) -> dict[str, Any]:
    """The attributes that make up a layer's state; of static storage, the slots that are filled."""
    state = {name: getattr(layer, name) for name in _NAMES}
    if isinstance(layer, StaticCompressedLayer):
        state["fixed"] = layer.fixed
        if layer.fixed:
            filled = layer.stored_tokens
            state |= {name: state[name][:, :, :filled] for name in ("keys", "values")}
    if isinstance(layer, QuantisedLayer):
        state["packed"] = layer.packed
    return state


def restore(layer: CompressedLayer, state: dict[str, Any]) -> None:
    """Give an empty layer the state of another one of its kind."""
    for name in _NAMES:
        setattr(layer, name, state[name] if name != "gaps" else state.get(name))  # once not saved
    if isinstance(layer.keys, Tensor):
        layer.dtype, layer.device = layer.keys.dtype, layer.keys.device
    if isinstance(layer, StaticCompressedLayer) and state["fixed"]:
        layer.fix()
    if isinstance(layer, QuantisedLayer):
        layer.packed = state["packed"]
