"""What is on disk of a document that was read once: its record, and beside it its cache, sealed.

`Document`, `Library` and a server's documents share this. The cache is a file of
`CompressedCache.save` with the document's token ids beside it, under "input_ids". The record is
JSON with a digest of itself; it holds the seal of the cache's file, and is written behind it: a
document is there if and only if its record is.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snapkv.cache.layer import CompressedLayer, LayerIdentity
from snapkv.cache.reading import Reading
from snapkv.cache.saving.encoding import COMPRESSED, coded_bytes, decode_layer
from snapkv.cache.saving.files import SealedFile, read_sealed, seal_of, write_sealed
from snapkv.cache.saving.records import BEGINNING, digest_of, from_record, record_of, seal_fault
from snapkv.cache.saving.writing import naming, replace_file, replacing
from snapkv.errors import (
    CacheFileError,
    CacheMismatchError,
    InvalidArgumentError,
    ModelNotFoundError,
    SnapKVError,
    UnsupportedModelError,
)
from snapkv.hf.cache import CompressedCache
from snapkv.hf.checkpoint import load_complete
from snapkv.hf.identity import identity_of, require_identity
from snapkv.hf.model_parts import length_dependent_rope
from snapkv.hf.saved import contents, encoded, fitting_together, policy_of, tensors_beside
from snapkv.policies import EvictingPolicy, FullCache, Policy
from snapkv.storage.dense import DenseStore
from snapkv.storage.dynamic import Dynamic
from snapkv.storage.static import StaticStore
from snapkv.validation import first_line, format_bytes

__all__ = [
    "BEGINNING",
    "StoredDocument",
    "digest_of",
    "from_record",
    "model_identity",
    "naming",
    "read_document",
    "record_of",
    "replace_file",
    "replacing",
    "seal_fault",
    "seal_of",
    "write_document",
]

_READ_AGAIN = "register the document's text instead"


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredDocument:
    """A document as an engine holds it: what every KV head of every layer has kept."""

    token_ids: Tensor  # (T,) int64, what the model has read
    # of every layer (Hkv, K) int64, positions of the kept tokens, ascending; K is that of the head
    # that keeps most, and -1 stands in front where another keeps fewer
    kept: Sequence[Tensor]
    keys: Sequence[Tensor]  # of every layer (Hkv, K, D), in the model's dtype; any for -1
    values: Sequence[Tensor]  # of every layer (Hkv, K, Dv)
    policy: Policy  # what has chosen them
    seal: str = ""  # SHA-256 of the file; "" before it is written

    @property
    def head_tokens(self) -> Tensor:
        """(layers, Hkv) int64, how many tokens every head keeps."""
        return torch.stack([(kept >= 0).sum(dim=-1) for kept in self.kept])

    def fault(self, dtype: str) -> str | None:
        """What is wrong with its tensors for a model of this dtype; None for nothing."""
        ids, layers = self.token_ids, len(self.kept)
        if not _are_indices(ids, 1, least=0):
            return f"token ids of {_said(ids)}"
        if not layers == len(self.keys) == len(self.values):
            return f"{len(self.keys)} keys and {len(self.values)} values for {layers} layers"
        if not layers or len({len(kept) for kept in self.kept}) > 1:
            return "no layers, or some with other heads"
        parts = zip(self.kept, self.keys, self.values, strict=True)
        faults = (_fault_of_layer(*layer, tokens=len(ids), dtype=dtype) for layer in parts)
        return next(filter(None, faults), None)


def _fault_of_layer(
    kept: Tensor, keys: Tensor, values: Tensor, *, tokens: int, dtype: str
) -> str | None:
    if not _are_indices(kept, 2, least=-1):
        return f"kept positions of {_said(kept)}"
    falls = (kept[:, 1:] <= kept[:, :-1]) & (kept[:, :-1] >= 0)
    if int(kept.max()) >= tokens or bool(falls.any()):
        return f"kept positions that are not ascending below {tokens}"
    for states in (keys, values):
        if states.ndim != 3 or states.shape[:2] != kept.shape or not states.shape[2]:
            return f"keys or values of {_said(states)} for positions of {_said(kept)}"
        if str(states.dtype) != f"torch.{dtype}":
            return f"keys or values of {_said(states)} for a model in {dtype}"
        if not bool(torch.isfinite(states).all()):
            return "keys or values that are infinite or no numbers"
    return None


def _are_indices(tensor: Tensor, axes: int, *, least: int) -> bool:
    """Whether it has so many axes, and whole numbers from `least` on."""
    is_whole = tensor.dtype in (torch.int32, torch.int64)
    return is_whole and tensor.ndim == axes and tensor.numel() > 0 and int(tensor.min()) >= least


def _said(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')}"


def model_identity(
    folder: str | Path, dtype: str, *, trust_remote_code: bool = False
) -> dict[str, Any]:
    """What files say of the model in a folder, as a process says that has it loaded.

    transformers loads the model on the CPU for it, and lets go of it: only that tells for certain
    which weights it has by which names. Ask once. `dtype` is the other program's.
    """
    place = Path(folder).absolute()
    if not (place / "config.json").is_file():
        raise ModelNotFoundError(
            f"model: expected a folder with a config.json, got {str(folder)!r}; check the path"
        )
    options = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    options |= {"dtype": getattr(torch, dtype)}
    remedy = "download it again, or correct its config.json"
    try:
        model = load_complete(place, place, told_by="config.json", remedy=remedy, **options)
    except SnapKVError:
        raise
    except (OSError, ValueError, RuntimeError, LookupError, AttributeError) as error:
        raise UnsupportedModelError(
            f"model: expected one that transformers loads in {dtype}, got {str(folder)!r}: "
            f"{first_line(error)}; register the text of documents, without files"
        ) from error
    CompressedCache(model, FullCache())  # refuses what cannot be compressed
    kind = length_dependent_rope(model.config.get_text_config(decoder=True))
    if kind is not None:
        raise UnsupportedModelError(
            f"model: expected a rotary embedding that is the same in transformers and in vLLM, got "
            f"{type(model).__name__} with rope_type {kind!r}, which each chooses by lengths of its "
            "own; register the text of documents, without files"
        )
    return identity_of(model)


def write_document(path: str | Path, model: Mapping[str, Any], document: StoredDocument) -> None:
    """Write a document for `CompressedCache.load`, `read_document` or an engine.

    The file is that of `cache.save(path, beside={"input_ids": token_ids[None]})` on a cache that
    the policy has left with these tokens. A cache that was saved there is replaced, any other file
    is refused; so is a policy that goes on choosing. `model` is the reader's `model_identity`.
    """
    fault, policy = document.fault(model["dtype"]), document.policy
    if fault is None and isinstance(policy, EvictingPolicy):
        fault = f"them from {policy.name}, which evicts while it generates"
    if fault is not None:
        raise InvalidArgumentError(
            f"document: expected token ids, and as many kept positions, keys and values in every "
            f"layer, got {fault}; pass what a method such as KVzip has left"
        )
    tokens, layers = len(document.token_ids), []
    parts_heads = any(bool((kept < 0).any()) for kept in document.kept)
    parts = zip(document.kept, document.keys, document.values, strict=True)
    for index, of_layer in enumerate(parts):
        layer = CompressedLayer(policy, LayerIdentity(layer_idx=index), Dynamic())
        positions, keys, values = (part[None] for part in of_layer)
        layer.restore_chosen(keys, values, positions, tokens, parts_heads=parts_heads)
        layers.append(layer)
    parameters = inspect.signature(CompressedCache).parameters.values()
    options = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    beside = {"input_ids": document.token_ids[None].to(torch.int64)}
    reading = Reading(layers=layers, prompt_end=tokens)
    write_sealed(Path(path), *encoded(layers, reading, options, model, beside))


def read_document(
    path: str | Path,
    *,
    model: Mapping[str, Any],
    most_bytes: int | None = None,
    is_settled: bool = False,
) -> StoredDocument:
    """The document in a file that `write_document` has written, or `CompressedCache.save`.

    A cache is a document where an engine can go on from it just as the library does: it has read
    one prompt, whose token ids were saved beside it, and nothing chooses again from what it keeps.
    Whether the shapes are those of an engine's layers, and whether that holds heads of different
    length, is the engine's to check. Nothing in the file is run.

    Args:
        path: the file.
        model: the `model_identity` of the model that is to go on from it.
        most_bytes: refuse a larger file before it is read, or one that unpacks to more.
        is_settled: whether whoever saved it keeps it as it is, as a library does, also where its
            policy has dropped nothing yet.

    Raises:
        CacheFileError: no such file, a larger one, or not one that was saved, whole and unchanged.
        CacheMismatchError: it belongs to another model or dtype.
        InvalidArgumentError: a cache that no engine can hold; the message says why.
    """
    path = Path(path)
    file = read_sealed(path, most_bytes=most_bytes)
    with fitting_together(path):
        _require_within(path, _spread_bytes(file), most_bytes)
        tensors, notes = contents(file)
        require_identity(model, notes["model"])
        ids = tensors_beside(tensors).get("input_ids")
        _refuse(path, _faults_of_notes(notes, ids))
        assert ids is not None  # it would have been refused
        layers = _layers(path, notes, tensors)
        _require_within(path, sum(map(_padded_bytes, layers)), most_bytes)
        _refuse(path, _faults_of_all(layers, is_settled=is_settled))
        kept, keys, values = zip(*map(_of_heads, layers), strict=True)
        document = StoredDocument(
            token_ids=ids.flatten(),
            kept=kept,
            keys=keys,
            values=values,
            policy=layers[0].policy,
            seal=file.seal,
        )
        if (fault := document.fault(model["dtype"])) is not None:
            raise ValueError(fault)
    return document


def _of_heads(layer: CompressedLayer) -> tuple[Tensor, ...]:
    """(Hkv, K) positions, and (Hkv, K, D) keys and values, K of the longest head."""
    positions = layer.stored_positions()[0]
    longest = int((positions >= 0).sum(dim=-1).max())
    first = positions.shape[-1] - longest
    return positions[:, first:], *(states[0, :, first:] for states in layer.store.padded())


def _require_within(path: Path, size: int, most_bytes: int | None) -> None:
    if most_bytes is not None and size > most_bytes:
        raise CacheFileError(
            f"path: expected a saved cache of at most {format_bytes(most_bytes)} in the model's "
            f"dtype, got {format_bytes(size)} at {str(path)!r}; save one that keeps fewer tokens, "
            "or raise the limit"
        )


def _padded_bytes(layer: CompressedLayer) -> int:
    """Bytes of a layer's keys and values where every head is as long as the longest."""
    store = layer.store
    widths = store.keys.shape[-1] + store.values.shape[-1]
    return int(store.num_kv_heads * store.slots * widths * store.keys.element_size())


def _spread_bytes(file: SealedFile) -> int:
    """Bytes that what is in few bits takes in the model's dtype."""
    layers = (saved for saved in file.notes["layers"] if saved["kind"] == COMPRESSED)
    return sum(coded_bytes(saved, file.tensors) for saved in layers)


def _layers(
    path: Path, notes: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> list[CompressedLayer]:
    """The layers of a cache: one row without pads."""
    try:
        policy = policy_of(notes["policy"])
    except CacheMismatchError as error:
        raise InvalidArgumentError(
            f"path: expected a saved cache of a method of this package, got {str(path)!r} of "
            f"{notes['policy']['name']!r}; {_READ_AGAIN}"
        ) from error
    layers = []
    for index, saved in enumerate(notes["layers"]):
        layer = CompressedLayer(policy, LayerIdentity(layer_idx=index), Dynamic())
        if saved["store_kind"] == StaticStore.kind:  # in files alike
            saved = saved | {"store_kind": DenseStore.kind}
        decode_layer(layer, saved, dict(tensors), torch.device("cpu"))
        _refuse(path, _faults_of_layer(layer))
        if not layer.store.slots <= layer.seen_tokens == notes["seen_tokens"]:
            raise ValueError(f"layer {index} has seen {layer.seen_tokens} tokens")
        layers.append(layer)
    return layers


_Faults = Iterator[tuple[str, str]]
"""What is wrong with a cache, and the remedy; the first is told, and what follows is not asked."""


def _refuse(path: Path, faults: _Faults) -> None:
    for got, remedy in faults:
        raise InvalidArgumentError(
            f"path: expected a saved cache that an engine can hold, got {str(path)!r}, {got}; "
            f"{remedy}"
        )


def _faults_of_notes(notes: Mapping[str, Any], input_ids: Tensor | None) -> _Faults:
    """Of its options, and of the tokens that were read, all of them the prompt's."""
    options = notes["options"]
    if notes["recalls"]:
        remedy = "save one that was made without recall"
        yield "whose evicted tokens lie off the device (recall)", remedy
    if bits := options.get("quantize"):
        yield f"whose tokens are held in {bits} (quantize)", "save one made without quantize"
    if options.get("turns") == "compress":
        yield "which chooses again with every turn (turns)", "save one made without turns"
    for index, saved in enumerate(notes["layers"]):
        if saved["kind"] != COMPRESSED:
            yield f"whose layer {index} is a {saved['kind']}, which keeps its own", _READ_AGAIN
    seen, begin, end = (notes[name] for name in ("seen_tokens", "turn_start", "prompt_end"))
    if not seen:
        yield "which has read nothing", "save one that has read a document"
    if begin or end != seen:
        got = f"which has seen {seen} tokens, of which the last prompt are those from {begin} to"
        yield f"{got} {end}", "save it right behind its first prompt, before it generates"
    if input_ids is None:
        remedy = 'save it with cache.save(path, beside={"input_ids": input_ids})'
        yield "without the token ids that it has read", remedy
        return
    if input_ids.ndim == 2 and len(input_ids) != 1:
        yield f"with token ids of {len(input_ids)} rows", "save a cache of one row"
    if input_ids.numel() != seen:
        got = f"with {input_ids.numel()} token ids for {seen} tokens"
        yield got, "save it beside the token ids that it has read"


def _faults_of_layer(layer: CompressedLayer) -> _Faults:
    store, slots = layer.store, layer.slots
    if len(store.keys) != 1:
        yield f"of {len(store.keys)} rows", "save a cache of one row for every document"
    pads = (slots.pads, slots.fillers)
    if any(marks is not None and bool(marks.any()) for marks in pads):
        yield "of a prompt with pads", "read the document without padding"
    if store.keys.shape[1] != store.num_kv_heads:
        got = f"with sets of their own for {store.keys.shape[1]} query heads"
        yield got, "use a method that keeps one for every KV head"
    if layer.notes.sink_keys is not None:
        yield "whose sinks were moved to other positions", _READ_AGAIN


def _faults_of_all(layers: Sequence[CompressedLayer], *, is_settled: bool) -> _Faults:
    policy = layers[0].policy
    is_settled |= all(layer.slots.is_compressed for layer in layers)
    # A method that has dropped nothing yet takes what is read next for the end of its prompt.
    if not is_settled and not isinstance(policy, FullCache):
        got = f"of which {policy.name} has dropped nothing, and would choose with the next prompt"
        yield got, "save one that keeps fewer tokens than it has read, or one of FullCache"
    if isinstance(policy, EvictingPolicy):
        yield f"of {policy.name}, which evicts while it generates", _READ_AGAIN
