"""A saved cache: whose it is, by which policy, and its layers; `CompressedCache.save`, `load`."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from transformers import PreTrainedModel

from snapkv.cache.read_ids import ReadIds
from snapkv.cache.saving.encoding import decode_layer, encode_layer
from snapkv.cache.saving.files import read_sealed, write_sealed
from snapkv.errors import (
    CacheFileError,
    CacheMismatchError,
    InvalidTypeError,
    SnapKVError,
    UnsupportedModelError,
)
from snapkv.hf.identity import identity_of, require_identity
from snapkv.hf.model_parts import has_images_positions
from snapkv.hf.placement import device_of, layer_devices
from snapkv.policies import POLICIES, Policy
from snapkv.storage.bits import KVCodes
from snapkv.storage.offload import Recall

Kind = TypeVar("Kind")

_BESIDE = "beside."
_OPTIONS = ("turns", "quantize", "protect")


def require_plain_positions(model: PreTrainedModel) -> None:
    """Refuse a file without what the model noted of its last image; of a text that is nothing."""
    if has_images_positions(model.modules()):
        raise UnsupportedModelError(
            f"model: expected positions that count tokens for a cache that is saved, got "
            f"{type(model).__name__} after an image, whose `rope_deltas` a loaded one would miss; "
            "keep the cache in memory, or set them to None if it has read no image"
        )


def write(
    cache: Any,
    options: Mapping[str, Any],
    path: Path,
    beside: Mapping[str, Tensor],
    codes: KVCodes | None = None,
    identity: Mapping[str, Any] | None = None,
    *,
    sweep: bool = True,
) -> None:
    """Write a `CompressedCache` that was made with these options, and further tensors.

    Keys and values go into these codes, where they are none yet. The model's `identity`, where it
    is known, need not be found again.
    """
    for name, each in beside.items():
        if not isinstance(each, Tensor):
            raise InvalidTypeError(
                f"beside: expected tensors, got {name!r} of type {type(each).__name__}; pass "
                "torch.tensor(...) of it"
            )
    model = identity or identity_of(cache.model)
    tensors, notes = encoded(cache, options, model, beside, codes)
    write_sealed(path, tensors, notes, sweep=sweep)


def encoded(
    cache: Any,
    options: Mapping[str, Any],
    model: Mapping[str, Any],
    beside: Mapping[str, Tensor],
    codes: KVCodes | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the notes of the file of a cache."""
    prompt_state = cache.prompt_state
    tensors = {f"{_BESIDE}{name}": value for name, value in beside.items()}
    tensors |= prompt_state.read_ids.up_to(prompt_state.seen_tokens).state()
    notes = {
        "model": dict(model),
        "policy": cache.policy.as_saved(),
        "options": {name: options[name] for name in _OPTIONS},
        "seen_tokens": prompt_state.seen_tokens,
        "prompt_end": prompt_state.prompt_end,
        "turn_start": prompt_state.turn_start,
        "question_tokens": prompt_state.question_tokens,
        "layers": [
            encode_layer(layer, f"layers.{index}", tensors, codes)
            for index, layer in enumerate(cache.layers)
        ],
    }
    return tensors, notes


def read(
    kind: type[Kind],
    path: Path,
    model: PreTrainedModel,
    policy: Policy | None,
    recall: Recall | None = None,
    recall_bytes: int | None = None,
    identity: Mapping[str, Any] | None = None,
) -> tuple[Kind, dict[str, Tensor]]:
    """A cache of that class out of a file, and the further tensors in it."""
    file, own = read_sealed(path), identity or identity_of(model)
    with fitting_together(path):
        require_identity(own, file.notes["model"])
        cache = _rebuilt(kind, file.tensors, file.notes, model, policy, recall, recall_bytes)
    return cache, tensors_beside(file.tensors)


def tensors_beside(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The further tensors in a file of a cache, by name."""
    return {
        name.removeprefix(_BESIDE): value
        for name, value in tensors.items()
        if name.startswith(_BESIDE)
    }


@contextlib.contextmanager
def fitting_together(path: Path) -> Iterator[None]:
    """Turn what goes wrong where a file's parts are put together into one line about the file."""
    try:
        yield
    except SnapKVError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CacheFileError(
            f"path: expected a cache that cache.save has written, got {str(path)!r}, whose "
            f"parts do not fit together ({error!r}); save it again"
        ) from error


def _rebuilt(
    kind: Any,
    tensors: dict[str, Tensor],
    notes: dict[str, Any],
    model: PreTrainedModel,
    policy: Policy | None,
    recall: Recall | None,
    recall_bytes: int | None,
) -> Any:
    """A cache out of what a file holds, of the same model."""
    options = {name: notes["options"][name] for name in _OPTIONS}
    if options["turns"] != "recall" and recall is not None:
        raise CacheMismatchError(
            f"recall: expected none for a cache that was saved without, whose dropped tokens "
            f"are gone, got {str(recall)!r}; leave recall out"
        )
    options |= {"recall": recall, "recall_bytes": recall_bytes}
    cache = kind(model, policy_of(notes["policy"], policy), **options)
    places, elsewhere = layer_devices(model), device_of(model)
    for index, (layer, saved) in enumerate(zip(cache.layers, notes["layers"], strict=True)):
        decode_layer(layer, saved, tensors, places.get(index, elsewhere))
    cache.prompt_state.prompt_end = notes["prompt_end"]
    cache.prompt_state.turn_start = notes["turn_start"]
    question_tokens = notes.get("question_tokens")  # which files of 0.3 and before do not have
    if not isinstance(question_tokens, int | None):
        raise TypeError(f"a question of {question_tokens!r} tokens")
    cache.expect_question(question_tokens)
    cache.prompt_state.read_ids = ReadIds.restored(tensors, cache.prompt_state.rows)
    return cache


def policy_of(description: dict[str, Any], given: Policy | None = None) -> Policy:
    """The policy that `Policy.describe` has described; one that is given must be the same."""
    if given is None:
        return _named_policy(description)
    known = (json.loads(json.dumps(own)) for own in (given.as_saved(), given.describe()))
    if description not in known:
        raise CacheMismatchError(
            f"policy: expected the one the cache was saved with, {description}, got "
            f"{given.describe()}; leave policy out"
        )
    return given


def _named_policy(saved: dict[str, Any]) -> Policy:
    parameters = dict(saved)
    name = parameters.pop("name")
    if name not in POLICIES:
        raise CacheMismatchError(
            f"policy: expected the method {name!r} that the cache was saved with, which is not one "
            f"of {', '.join(POLICIES)}; pass it to load"
        )
    if isinstance(parameters.get("gate"), str):  # a file may name no other file
        raise CacheMismatchError(
            f"policy: expected the gate itself in a saved {name}, got the name of a file; save the "
            "cache again"
        )
    inner = {
        key: _named_policy(value) if isinstance(value, dict) and "name" in value else _frozen(value)
        for key, value in parameters.items()
    }
    if inner.get("page_tokens", 0) is None:  # 0.3.0 wrote it for AdaKV, which keeps no pages now
        del inner["page_tokens"]
    try:
        return POLICIES[name](**inner)
    except InvalidTypeError as error:  # the file is wrong, not an argument of the caller's
        raise TypeError(str(error)) from error


def _frozen(value: Any) -> Any:
    """A parameter as it was before JSON made lists of its tuples."""
    return tuple(_frozen(part) for part in value) if isinstance(value, list) else value
