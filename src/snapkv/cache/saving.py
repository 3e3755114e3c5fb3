"""A cache as tensors and notes, and back: what `CompressedCache.save` and `load` write and read.

Nothing in a file is run: it names a policy out of the table of policies, attributes that a new
cache's layers have, and a few kinds of records.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.cache.codes import Codes
from snapkv.cache.files import read_sealed, write_sealed
from snapkv.cache.identity import identity_of, require_identity
from snapkv.cache.layer import CompressedLayer
from snapkv.cache.layer_state import restore, state_of
from snapkv.cache.ragged import RaggedStates
from snapkv.cache.sinks import MovedSinks
from snapkv.errors import CacheFileError, CacheMismatchError, SnapKVError, UnsupportedModelError
from snapkv.policies import POLICIES, Policy

_RECORDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Codes, RaggedStates, MovedSinks)}
_BESIDE = "beside."
_OPTIONS = ("storage", "room_tokens", "turns", "refresh_every", "quantize")


class SavedCache:
    """The part of a cache that goes to disk and comes back."""

    def save(self: Any, path: str | Path, *, beside: Mapping[str, Tensor] | None = None) -> None:
        """Write the cache to a file: safetensors, with its policy, its model and all it has seen.

        The file appears under its name when it is complete; a crash leaves what was there before.
        Its header holds a checksum of every byte.

        Args:
            path: the file; a cache that was saved there is replaced, any other file is refused.
            beside: tensors to keep with it, such as the token ids; `load_with` gives them back.

        Raises:
            CacheFileError: the file cannot be written, or holds something else than a cache.
            CacheMismatchError: the model is gone, so that the file could not say whose it is.
        """
        tensors = {f"{_BESIDE}{name}": value for name, value in (beside or {}).items()}
        notes = {
            "model": identity_of(self.model),
            "policy": self.policy.describe(),
            "options": {name: self.options[name] for name in _OPTIONS},
            "recalls": self.options["recall"] is not None,
            "seen_tokens": self.get_seq_length(),
            "prompt_end": self.prompt_end,
            "turn_start": self.turn_start,
            "layers": [
                _encode_layer(layer, f"layers.{index}", tensors)
                for index, layer in enumerate(self.layers)
            ],
        }
        write_sealed(Path(path), tensors, notes)

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel, **options: Any) -> Self:
        """The cache that `save` has written, for the same model in the same dtype.

        Args:
            path: the file. It is read in full and checked first; nothing in it is run.
            model: the model that filled the cache, on any device.
            options: `policy`, where it is not one of the package's, or needs a tokenizer; `recall`
                and `recall_bytes`, as in `CompressedCache`, for a cache that was saved with recall,
                "host" if left out.

        Raises:
            CacheFileError: no such file, or not one that `save` has written, whole and unchanged.
            CacheMismatchError: another model, dtype or policy than the cache was saved with.
        """
        cache, _ = cls.load_with(path, model, **options)
        return cache

    @classmethod
    def load_with(
        cls,
        path: str | Path,
        model: PreTrainedModel,
        *,
        policy: Policy | None = None,
        recall: str | Path | None = None,
        recall_bytes: int | None = None,
    ) -> tuple[Self, dict[str, Tensor]]:
        """As `load`, with the tensors that were saved beside the cache."""
        _require_one_device(model)
        tensors, notes = read_sealed(Path(path))
        try:
            cache = cls._rebuilt(tensors, notes, model, policy, recall, recall_bytes)
        except SnapKVError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CacheFileError(
                f"path: expected a cache that cache.save has written, got {str(path)!r}, whose "
                f"parts do not fit together ({error!r}); save it again"
            ) from error
        beside = {
            name.removeprefix(_BESIDE): value
            for name, value in tensors.items()
            if name.startswith(_BESIDE)
        }
        return cache, beside

    @classmethod
    def _rebuilt(
        cls,
        tensors: dict[str, Tensor],
        notes: dict[str, Any],
        model: PreTrainedModel,
        policy: Policy | None,
        recall: str | Path | None,
        recall_bytes: int | None,
    ) -> Self:
        """A cache out of what a file holds."""
        require_identity(model, notes["model"])
        if notes["recalls"]:
            recall = "host" if recall is None else recall
        elif recall is not None:
            raise CacheMismatchError(
                f"recall: expected none for a cache that was saved without, whose dropped tokens "
                f"are gone, got {str(recall)!r}; leave recall out"
            )
        options = {**notes["options"], "recall": recall, "recall_bytes": recall_bytes}
        cache: Any = cls(model, _policy_for(policy, _completed(notes["policy"])), **options)  # type: ignore[call-arg] # the cache's own
        for layer, saved in zip(cache.layers, notes["layers"], strict=True):
            _decode_layer(layer, saved, tensors, model.device)
        cache.prompt_end = notes["prompt_end"]
        cache.turn_start = notes.get("turn_start", 0)  # once not saved
        rebuilt: Self = cache
        return rebuilt


def _require_one_device(model: PreTrainedModel) -> None:
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"model: expected one whose layers are all on one device to load a cache for, got one "
            f"on {', '.join(sorted(devices))}; load it with device_map=None"
        )


def _completed(saved: dict[str, Any]) -> dict[str, Any]:
    """A saved description as today's policies have it, of a cache that kept what it kept.

    Before all methods that have sinks could be told how many, they had none and said nothing; and
    a budget could have room for fewer of them than it was told.
    """
    complete: dict[str, Any] = {
        key: _completed(value) if isinstance(value, dict) and "name" in value else value
        for key, value in saved.items()
    }
    kind = POLICIES.get(saved["name"])
    if kind is not None and any(field.name == "sink_tokens" for field in fields(kind)):
        complete.setdefault("sink_tokens", 0)
        if complete["budget"] is not None:
            room = complete["budget"] - complete["window_size"]
            complete["sink_tokens"] = min(complete["sink_tokens"], room)
    return complete


def _policy_for(given: Policy | None, saved: dict[str, Any]) -> Policy:
    """The policy that a cache was made with; one that is given must be the same."""
    if given is not None:
        if _plain(given.describe()) != saved:
            raise CacheMismatchError(
                f"policy: expected the one the cache was saved with, {saved}, got "
                f"{given.describe()}; leave policy out"
            )
        return given
    return _named_policy(saved)


def _named_policy(saved: dict[str, Any]) -> Policy:
    parameters = dict(saved)
    name = parameters.pop("name")
    if name not in POLICIES:
        raise CacheMismatchError(
            f"policy: expected the method {name!r} that the cache was saved with, which is none of "
            f"{', '.join(POLICIES)}; pass it to load"
        )
    inner = {
        key: _named_policy(value) if isinstance(value, dict) and "name" in value else value
        for key, value in parameters.items()
    }
    return POLICIES[name](**inner)


def _plain(value: Any) -> Any:
    """A description as JSON brings it back."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _encode_layer(layer: Any, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A layer's kind and attributes; its tensors are added to `tensors`."""
    compressed = isinstance(layer, CompressedLayer)
    state = state_of(layer) if compressed else vars(layer)
    saved: dict[str, Any] = {
        "kind": type(layer).__name__,
        "state": {
            key: _encode(value, f"{name}.{key}", tensors)
            for key, value in state.items()
            if compressed or _is_saveable(value)
        },
    }
    if compressed and layer.host_bytes:
        saved["parked"] = _encode(layer.parked.on_host(), f"{name}.parked", tensors)
    return saved


def _decode_layer(
    layer: Any, saved: dict[str, Any], tensors: dict[str, Tensor], device: torch.device
) -> None:
    """Fill a layer that has just been made."""
    if saved["kind"] != type(layer).__name__:
        raise CacheMismatchError(
            f"model: expected a layer of the kind {saved['kind']}, as the cache has, got "
            f"{type(layer).__name__}; load it with the release of transformers that saved it"
        )
    state = {
        key: _decode(value, lambda name: tensors[name].to(device))
        for key, value in saved["state"].items()
    }
    if isinstance(layer, CompressedLayer):
        if "parked" in saved and layer.parked is not None:
            layer.parked.append(*_decode(saved["parked"], tensors.__getitem__), on=device)
        restore(layer, state)
        return
    if unknown := state.keys() - vars(layer).keys():
        raise CacheFileError(
            f"path: expected what a {type(layer).__name__} of this transformers has, got "
            f"{', '.join(sorted(unknown))}; load it with the release of transformers that saved it"
        )
    vars(layer).update(state)
    if isinstance(vars(layer).get("keys"), Tensor):
        layer.dtype, layer.device = layer.keys.dtype, device


def _is_saveable(value: Any) -> bool:
    """Whether an attribute of transformers' own layers says what they hold, or only where."""
    if isinstance(value, dict):
        return all(_is_saveable(part) for part in value.values())
    return value is None or isinstance(value, Tensor | bool | int | float | str)


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON; where a tensor stands, its name."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        pairs = [[key, _encode(part, f"{name}.{key}", tensors)] for key, part in value.items()]
        return {"dict": pairs}
    if isinstance(value, list | tuple):
        return [_encode(part, f"{name}.{place}", tensors) for place, part in enumerate(value)]
    if type(value).__name__ in _RECORDS:
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return {
            "record": type(value).__name__,
            "parts": {key: _encode(part, f"{name}.{key}", tensors) for key, part in parts.items()},
        }
    return value


def _decode(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """What `_encode` was given; sequences come back as tuples."""
    if isinstance(value, list):
        return tuple(_decode(part, tensor) for part in value)
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensor(value["tensor"])
    if "dict" in value:
        return {key: _decode(part, tensor) for key, part in value["dict"]}
    parts = {key: _decode(part, tensor) for key, part in value["parts"].items()}
    return _RECORDS[value["record"]](**parts)
