"""What an engine reads of a document in a library: its cache, in a file that is sealed.

The file is that of `CompressedCache.save` with the document's token ids under
"input_ids". Nothing in it is run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snapkv.cache.layer import CompressedLayer, LayerIdentity
from snapkv.cache.saving.encoding import COMPRESSED, coded_bytes, decode_layer
from snapkv.cache.saving.files import SealedFile, read_sealed
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
from snapkv.hf.saved import fitting_together, policy_of, tensors_beside
from snapkv.policies import EvictingPolicy, FullCache
from snapkv.validation import first_line, format_bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredDocument:
    """A document as an engine holds it: what every KV head of every layer has kept."""

    token_ids: Tensor  # (T,) int64, what the model has read
    # of every layer (Hkv, K) int64, positions of the kept tokens, ascending; K is that of the head
    # that keeps most, and -1 stands in front where another keeps fewer
    kept: Sequence[Tensor]
    keys: Sequence[Tensor]  # of every layer (Hkv, K, D), in the model's dtype; any for -1
    values: Sequence[Tensor]  # of every layer (Hkv, K, Dv)

    @property
    def head_tokens(self) -> Tensor:
        """(layers, Hkv) int64, how many tokens every head keeps."""
        return torch.stack([(kept >= 0).sum(dim=-1) for kept in self.kept])

    def require_whole(self, dtype: str) -> None:
        """Raise a ValueError unless its tensors are those of a document, for a model in `dtype`."""
        if not _are_indices(self.token_ids, 1, least=0):
            raise ValueError(f"token ids of {_said(self.token_ids)}")
        if len({len(kept) for kept in self.kept}) != 1:
            raise ValueError("no layers, or some with other heads")
        for kept, *states in zip(self.kept, self.keys, self.values, strict=True):
            _require_kept(kept, len(self.token_ids))
            for each in states:
                if each.ndim != 3 or each.shape[:2] != kept.shape or not each.shape[2]:
                    raise ValueError(f"keys or values of {_said(each)} at {_said(kept)}")
                if str(each.dtype) != f"torch.{dtype}" or not bool(torch.isfinite(each).all()):
                    raise ValueError(f"keys or values of {_said(each)}, not all finite {dtype}")


def _require_kept(kept: Tensor, tokens: int) -> None:
    falls = (kept[:, 1:] <= kept[:, :-1]) & (kept[:, :-1] >= 0)
    if not _are_indices(kept, 2, least=-1) or int(kept.max()) >= tokens or bool(falls.any()):
        raise ValueError(f"kept positions of {_said(kept)}, not ascending below {tokens}")


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


def read_document(
    path: str | Path,
    *,
    model: Mapping[str, Any],
    seal: str | None = None,
    most_bytes: int | None = None,
) -> StoredDocument:
    """The document in a file that a library has written.

    It has read one prompt, whose token ids are in the file, and nothing chooses again from
    what it keeps. Whether the shapes are those of an engine's layers, and whether that holds heads
    of different length, is the engine's to check.

    Args:
        path: the file.
        model: the `model_identity` of the model that is to go on from it.
        seal: the digest that it must have, see `snapkv.library.records.Record`; None for any.
        most_bytes: refuse a larger file before it is read, or one that unpacks to more.

    Raises:
        CacheFileError: no such file, a larger one, another one than has this seal, or not one that
            was saved, whole and unchanged.
        CacheMismatchError: it belongs to another model or dtype.
        InvalidArgumentError: a cache that no engine can hold; the message says why.
    """
    path = Path(path)
    file = read_sealed(path, most_bytes=most_bytes)
    if seal not in (None, file.seal):
        raise CacheFileError(
            f"path: expected the file that was recorded, got another one at {str(path)!r} by now; "
            "add the document to the library again"
        )
    with fitting_together(path):
        _require_within(path, _spread_bytes(file), most_bytes)
        tensors, notes = file.tensors, file.notes
        require_identity(model, notes["model"])
        ids = tensors_beside(tensors).get("input_ids")
        _refuse(path, _faults_of_notes(notes, ids))
        assert ids is not None  # it would have been refused
        layers = _layers(path, notes, tensors)
        _require_within(path, sum(map(_padded_bytes, layers)), most_bytes)
        kept, keys, values = zip(*map(_of_heads, layers), strict=True)
        document = StoredDocument(token_ids=ids.flatten(), kept=kept, keys=keys, values=values)
        document.require_whole(model["dtype"])
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
        own = f"of {notes['policy']['name']!r}, no method of this package"
        raise _refusal(path, own) from error
    layers = []
    for index, saved in enumerate(notes["layers"]):
        layer = CompressedLayer(policy, LayerIdentity(layer_idx=index), None)
        decode_layer(layer, saved, dict(tensors), torch.device("cpu"))
        _refuse(path, _faults_of_layer(layer))
        if not layer.store.slots <= layer.seen_tokens == notes["seen_tokens"]:
            raise ValueError(f"layer {index} has seen {layer.seen_tokens} tokens")
        layers.append(layer)
    return layers


def _refuse(path: Path, faults: Iterator[str]) -> None:
    """Raise with the first fault, if there is one; what follows it is not asked."""
    for got in faults:
        raise _refusal(path, got)


def _refusal(path: Path, got: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"path: expected a saved cache that an engine can hold, got {str(path)!r}, {got}; register "
        "the document's text instead"
    )


def _faults_of_notes(notes: Mapping[str, Any], input_ids: Tensor | None) -> Iterator[str]:
    """What is wrong with its options, and with the tokens that were read, all of a prompt."""
    options, seen = notes["options"], notes["seen_tokens"]
    for index, saved in enumerate(notes["layers"]):
        if saved["kind"] != COMPRESSED:
            yield f"whose layer {index} is a {saved['kind']}, which keeps its own"
    if options.get("quantize") or options.get("turns") not in (None, "append"):
        yield "made with recall, quantize or turns, as no library makes one"
    if not seen or notes["turn_start"] or notes["prompt_end"] != seen:
        yield f"which has seen {seen} tokens, and not as one prompt"
    if input_ids is None or input_ids.numel() != seen or input_ids.shape[:-1] not in ((), (1,)):
        yield "without the token ids of the row that it has read"


def _faults_of_layer(layer: CompressedLayer) -> Iterator[str]:
    store, slots = layer.store, layer.slots
    pads = (slots.pads, slots.padding_slots)
    if len(store.keys) != 1 or any(marks is not None and bool(marks.any()) for marks in pads):
        yield "of several rows, or of a prompt with pads"
    if store.keys.shape[1] != store.num_kv_heads:
        yield f"with sets of their own for {store.keys.shape[1]} query heads"
    if layer.state.sink_keys is not None:
        yield "whose sinks were moved to other positions"
    if isinstance(layer.policy, EvictingPolicy):
        yield f"of {layer.policy.name}, which evicts while it generates"
