"""Files of shared documents: what the library has compressed an engine can hold, and back.

A file is the one of `CompressedCache.save`, with the document's token ids beside the cache. Reading
and writing it takes the library's own cache, but no vLLM; of the model its identity is enough.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snapkv.app.models import load
from snapkv.cache.layer import CompressedLayer, LayerIdentity
from snapkv.cache.reading import Reading
from snapkv.cache.saving.encoding import spread_bytes
from snapkv.cache.saving.files import read_sealed, write_sealed
from snapkv.cache.slots import SlotMap
from snapkv.errors import CacheFileError, InvalidArgumentError, UnsupportedModelError
from snapkv.hf.cache import CompressedCache
from snapkv.hf.identity import identity_of, require_identity
from snapkv.hf.model_parts import length_dependent_rope
from snapkv.hf.saved import contents, encoded, fitting_together, tensors_beside
from snapkv.policies import EvictingPolicy, Policy
from snapkv.storage.dense import DenseStore, Dynamic
from snapkv.validation import format_bytes
from snapkv_vllm.documents.plain import fault_of, plain_layers, require_plain


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredDocument:
    """A document as an engine holds it; every layer and head keeps as many tokens, K.

    Attributes:
        token_ids: (T,) int64, what the model has read.
        kept: (layers, Hkv, K) int64, positions of the kept tokens, ascending.
        keys: of every layer (Hkv, K, D), in the model's dtype, as attention sees them.
        values: of every layer (Hkv, K, Dv).
        policy: what has chosen them.
        seal: SHA-256 of the file.
    """

    token_ids: Tensor
    kept: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    policy: Policy
    seal: str


def model_identity(
    folder: str | Path, dtype: str, *, trust_remote_code: bool = False
) -> dict[str, Any]:
    """What files say of the model in a folder, as a process says that has it loaded.

    transformers loads the model on the CPU for it, and lets go of it: only that tells for certain
    which weights it has by which names. Where the checkpoint has them by those names and in this
    dtype, they stay in the file but for those that are looked at; others are made in memory, as
    much as the model takes. Ask once.

    Args:
        folder: the folder that vLLM loads.
        dtype: "float32", "bfloat16" or "float16", the one that vLLM computes in.
        trust_remote_code: run model code that comes with the checkpoint.

    Raises:
        ModelNotFoundError: no such folder, or one without a model.
        InvalidArgumentError: another dtype, or a damaged checkpoint.
        UnsupportedModelError: transformers cannot load it, its cache cannot be compressed, or its
            keys depend on the text's length, in transformers otherwise than in vLLM.
    """
    place = str(Path(folder).absolute())
    model = load(place, device="cpu", dtype=dtype, trust_remote_code=trust_remote_code).model
    kind = length_dependent_rope(model.config.get_text_config(decoder=True))
    if kind is not None:
        raise UnsupportedModelError(
            f"model: expected a rotary embedding that is the same in transformers and in vLLM, got "
            f"{type(model).__name__} with rope_type {kind!r}, which each chooses by lengths of its "
            "own; register the text of documents, without files"
        )
    return identity_of(model)


def write_document(
    path: str | Path,
    *,
    model: Mapping[str, Any],
    token_ids: Tensor,
    kept: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    policy: Policy,
) -> None:
    """Write a document that an engine holds, for `CompressedCache.load` or another engine.

    The file is that of `cache.save(path, beside={"input_ids": token_ids[None]})` on a cache that
    the policy has left with these tokens.

    Args:
        path: the file; a cache that was saved there is replaced, any other file is refused.
        model: the `model_identity` of the model that has read it.
        token_ids: (T,) integers.
        kept: (layers, Hkv, K) integers, ascending positions below T.
        keys: of every layer of the model (Hkv, K, D), from any device.
        values: of every layer (Hkv, K, Dv).
        policy: what has chosen them.

    Raises:
        InvalidArgumentError: tensors that do not fit together, that hold other than numbers of the
            model's dtype, or a policy that goes on choosing.
        CacheFileError: the file cannot be written, or holds something else than a cache.
    """
    fault = fault_of(token_ids, kept, keys, values, model["dtype"])
    if fault is None and isinstance(policy, EvictingPolicy):
        fault = f"them from {policy.name}, which evicts while it generates"
    if fault is not None:
        raise InvalidArgumentError(
            f"document: expected token ids, and as many kept positions, keys and values in every "
            f"layer and head, got {fault}; pass what a method such as KVzip has left"
        )
    tokens, layers = len(token_ids), []
    for index, positions in enumerate(kept):
        layer = CompressedLayer(policy, LayerIdentity(layer_idx=index), Dynamic())
        states = keys[index][None], values[index][None]
        state = dict(zip(("keys", "values"), states, strict=True), num_kv_heads=len(positions))
        slots = SlotMap().chosen(positions[None], tokens, chosen_at=tokens)
        layer.restore(DenseStore.kind, state, slots)
        layers.append(layer)
    reading = Reading(layers=layers, prompt_end=tokens)
    beside = {"input_ids": token_ids[None].to(torch.int64)}
    write_sealed(Path(path), *encoded(layers, reading, _default_options(), model, beside))


def read_document(
    path: str | Path, *, model: Mapping[str, Any], most_bytes: int | None = None
) -> StoredDocument:
    """The document in a file that `write_document` has written, or `CompressedCache.save`.

    A cache is a document where an engine can go on from it just as the library does: it has read
    one prompt, whose token ids were saved beside it under the name "input_ids", it keeps as many
    tokens in every layer and head, and nothing chooses from them again. Whether keys and values
    have the shape that an engine's layers have is the engine's to check.

    Args:
        path: the file. It is read in full; nothing in it is run.
        model: the `model_identity` of the model that is to go on from it.
        most_bytes: refuse a larger file before it is read, or one whose packed keys and values
            would take more.

    Raises:
        CacheFileError: no such file, a larger one, or not one that was saved, whole and unchanged.
        CacheMismatchError: it belongs to another model or dtype.
        InvalidArgumentError: a cache that no engine can hold; the message says why.
    """
    path = Path(path)
    file = read_sealed(path, most_bytes=most_bytes)
    with fitting_together(path):
        _require_spread(path, file.notes, most_bytes)
        tensors, notes = contents(file)
        require_identity(model, notes["model"])
        return _document(path, notes, tensors, model["dtype"], file.seal)


def _document(
    path: Path, notes: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: str, seal: str
) -> StoredDocument:
    ids = tensors_beside(tensors).get("input_ids")
    require_plain(path, notes, ids)
    assert ids is not None
    layers = plain_layers(path, notes, tensors)
    keys, values = zip(*(layer.store.padded() for layer in layers), strict=True)
    document = StoredDocument(
        token_ids=ids.flatten().to(torch.int64),
        kept=torch.cat([layer.stored_positions() for layer in layers]),
        keys=tuple(states[0] for states in keys),
        values=tuple(states[0] for states in values),
        policy=layers[0].policy,
        seal=seal,
    )
    fault = fault_of(ids.flatten(), document.kept, document.keys, document.values, dtype)
    if fault is not None:
        raise ValueError(fault)
    return document


def _require_spread(path: Path, notes: Mapping[str, Any], most_bytes: int | None) -> None:
    """Refuse packed keys and values that take too much when they are spread out."""
    size = spread_bytes(notes.get("packed", {}))
    if most_bytes is not None and size > most_bytes:
        raise CacheFileError(
            f"path: expected a saved cache of at most {format_bytes(most_bytes)} in the model's "
            f"dtype, got {format_bytes(size)} at {str(path)!r}; save one that keeps fewer tokens, "
            "or raise the limit"
        )


def _default_options() -> dict[str, Any]:
    """What a `CompressedCache` is made with where nothing is said."""
    parameters = inspect.signature(CompressedCache).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
