"""Which saved caches an engine can hold: plain sets of tokens that nobody chooses from again."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snapkv.cache.layer import CompressedLayer, LayerIdentity
from snapkv.cache.saving.encoding import COMPRESSED, decode_layer
from snapkv.errors import CacheMismatchError, InvalidArgumentError
from snapkv.hf.saved import policy_of
from snapkv.policies import EvictingPolicy, FullCache, Policy
from snapkv.storage.dense import DenseStore, Dynamic
from snapkv.storage.static import StaticStore

Faults = Iterator[tuple[str, str]]
"""What is wrong with a cache, and the remedy; the first is told, and what follows is not asked."""

_READ_AGAIN = "register the document's text instead"


def require_plain(path: Path, notes: Mapping[str, Any], input_ids: Tensor | None) -> None:
    """Refuse a cache of which the file's notes say that no engine can hold it.

    Raises:
        InvalidArgumentError: such a cache.
    """
    _refuse(path, _of_options(notes))
    _refuse(path, _of_prompt(notes, input_ids))


def plain_layers(
    path: Path, notes: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> list[CompressedLayer]:
    """The layers of a cache: one row without pads, every head with as many tokens.

    Raises:
        InvalidArgumentError: others, or such that go on choosing.
        ValueError: layers that do not fit what the notes say.
    """
    policy = _policy(path, notes["policy"])
    layers = []
    for index, saved in enumerate(notes["layers"]):
        layer = CompressedLayer(policy, LayerIdentity(layer_idx=index), Dynamic())
        is_dense = saved["store_kind"] in (DenseStore.kind, StaticStore.kind)  # in files alike
        kind = DenseStore.kind if is_dense else saved["store_kind"]
        decode_layer(layer, saved | {"store_kind": kind}, dict(tensors), torch.device("cpu"))
        _refuse(path, _of_layer(layer))
        if layer.seen_tokens != notes["seen_tokens"]:
            raise ValueError(f"layer {index} has seen {layer.seen_tokens} tokens")
        layers.append(layer)
    _refuse(path, _of_lengths(layers))
    _refuse(path, _of_choices(policy, layers))
    if isinstance(policy, EvictingPolicy):
        _refuse(path, iter([(f"of {policy.name}, which evicts while it generates", _READ_AGAIN)]))
    return layers


def fault_of(
    token_ids: Tensor,
    kept: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    dtype: str,
) -> str | None:
    """What is wrong with a document's tensors, shapes as in `StoredDocument`; None for nothing.

    Numbers that are none would stay in an engine's blocks, and be read with other requests' tokens.
    """
    if not _are_indices(token_ids, 1):
        return f"token ids of {_said(token_ids)}"
    if not _are_indices(kept, 3):
        return f"kept positions of {_said(kept)}"
    if int(kept.max()) >= len(token_ids) or bool((kept.diff(dim=-1) <= 0).any()):
        return f"kept positions that are not ascending below {len(token_ids)}"
    if not len(kept) == len(keys) == len(values):
        return f"{len(keys)} keys and {len(values)} values for {len(kept)} layers"
    for states in (*keys, *values):
        if states.ndim != 3 or states.shape[:2] != kept.shape[1:] or not states.shape[2]:
            return f"keys or values of {_said(states)} for positions of {_said(kept)}"
        if str(states.dtype) != f"torch.{dtype}":
            return f"keys or values of {_said(states)} for a model in {dtype}"
        if not bool(torch.isfinite(states).all()):
            return "keys or values that are infinite or no numbers"
    return None


def _are_indices(tensor: Tensor, axes: int) -> bool:
    """Whether it has so many axes, and numbers from zero on."""
    is_whole = tensor.dtype in (torch.int32, torch.int64)
    return is_whole and tensor.ndim == axes and tensor.numel() > 0 and int(tensor.min()) >= 0


def _said(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')}"


def _refuse(path: Path, faults: Faults) -> None:
    for got, remedy in faults:
        raise InvalidArgumentError(
            f"path: expected a saved cache that an engine can hold, got {str(path)!r}, {got}; "
            f"{remedy}"
        )


def _of_options(notes: Mapping[str, Any]) -> Faults:
    options = notes["options"]
    if notes["recalls"]:
        yield (
            "whose evicted tokens lie off the device (recall)",
            "save one that was made without recall",
        )
    if bits := options.get("quantize"):
        yield f"whose tokens are held in {bits} (quantize)", "save one made without quantize"
    if options.get("turns") == "compress":
        yield "which chooses again with every turn (turns)", "save one made without turns"
    for index, saved in enumerate(notes["layers"]):
        if saved["kind"] != COMPRESSED:
            yield f"whose layer {index} is a {saved['kind']}, which keeps its own", _READ_AGAIN


def _of_prompt(notes: Mapping[str, Any], input_ids: Tensor | None) -> Faults:
    """What is wrong with the tokens that were read, all of them the prompt's."""
    seen, begin, end = (notes[name] for name in ("seen_tokens", "turn_start", "prompt_end"))
    if not seen:
        yield "which has read nothing", "save one that has read a document"
    if begin or end != seen:
        yield (
            f"which has seen {seen} tokens, of which the last prompt are those from {begin} to "
            f"{end}",
            "save it right behind its first prompt, before it generates",
        )
    if input_ids is None:
        yield (
            "without the token ids that it has read",
            'save it with cache.save(path, beside={"input_ids": input_ids})',
        )
        return
    if input_ids.ndim == 2 and len(input_ids) != 1:
        yield f"with token ids of {len(input_ids)} rows", "save a cache of one row"
    if input_ids.numel() != seen:
        yield (
            f"with {input_ids.numel()} token ids for {seen} tokens",
            "save it beside the token ids that it has read",
        )


def _of_layer(layer: CompressedLayer) -> Faults:
    store, slots, index = layer.store, layer.slots, layer.identity.layer_idx
    if len(store.keys) != 1:
        yield f"of {len(store.keys)} rows", "save a cache of one row for every document"
    pads = (slots.pads, slots.fillers)
    if any(marks is not None and bool(marks.any()) for marks in pads):
        yield "of a prompt with pads", "read the document without padding"
    if store.keys.shape[1] != store.num_kv_heads:
        yield (
            f"with sets of their own for {store.keys.shape[1]} query heads",
            "use a method that keeps one for every KV head",
        )
    if layer.notes.sink_keys is not None:
        yield "whose sinks were moved to other positions", _READ_AGAIN
    if bool((layer.stored_positions() < 0).any()):
        yield (
            f"whose heads keep different numbers of tokens in layer {index}",
            "use a method that keeps as many in each, such as KVzip without AdaKV",
        )


def _of_lengths(layers: Sequence[CompressedLayer]) -> Faults:
    lengths = sorted({layer.store.slots for layer in layers})
    if len(lengths) > 1:
        yield (
            f"whose layers keep different numbers of tokens, from {lengths[0]} to {lengths[-1]}",
            "use a method that keeps as many in each, such as KVzip",
        )


def _of_choices(policy: Policy, layers: Sequence[CompressedLayer]) -> Faults:
    """A method that has dropped nothing yet takes what is read next for the end of its prompt."""
    is_done = all(layer.slots.is_compressed for layer in layers)
    if not is_done and not isinstance(policy, FullCache):
        yield (
            f"of which {policy.name} has dropped nothing, and would choose with the next prompt",
            "save one that keeps fewer tokens than it has read, or one of FullCache",
        )


def _policy(path: Path, description: dict[str, Any]) -> Policy:
    try:
        return policy_of(description)
    except CacheMismatchError as error:
        raise InvalidArgumentError(
            f"path: expected a saved cache of a method of this package, got {str(path)!r} of "
            f"{description['name']!r}; {_READ_AGAIN}"
        ) from error
