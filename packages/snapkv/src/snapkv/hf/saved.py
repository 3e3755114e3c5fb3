"""Saving and loading a cache: the file holds its layers, its policy and the model's identity."""

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
    wrong,
)
from snapkv.hf.identity import identity_of, require_identity
from snapkv.hf.model_parts import has_read_image
from snapkv.hf.placement import device_of, layer_devices
from snapkv.policies import POLICIES, Policy
from snapkv.storage.bits import KVCodes
from snapkv.storage.offload import Recall

Kind = TypeVar("Kind")

_BESIDE = "beside."
_OPTIONS = ("turns", "quantize", "protect")


def require_plain_positions(model: PreTrainedModel) -> None:
    """Raise if the model has read an image that shifts positions, since a file cannot hold that.

    Raises:
        UnsupportedModelError: the model's `rope_deltas` are not zero.
    """
    if has_read_image(model.modules()):
        raise wrong(
            "model",
            f"the positions of {type(model).__name__} do not count tokens after an image, and a "
            "saved cache would not contain the `rope_deltas` of the model",
            "Keep the cache in memory, or set `rope_deltas` to None if the model has not read an "
            "image",
            UnsupportedModelError,
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
    """Write a `CompressedCache` and further tensors to a file.

    Args:
        cache: the cache.
        options: the options that the cache was made with.
        path: the file to write; see `CompressedCache.save`.
        beside: further tensors to store, by name.
        codes: the quantized form in which to store keys and values that are not quantized yet;
            None to store them as they are.
        identity: the identity of the model, if it is known already.
        sweep: whether to delete unfinished files that killed processes have left for `path`.

    Raises:
        CacheFileError: the file cannot be written, or another kind of file has that name.
        InvalidArgumentError: a stored number is not finite.
        InvalidTypeError: a value of `beside` is not a tensor.
    """
    for name, each in beside.items():
        if not isinstance(each, Tensor):
            raise wrong(
                "beside",
                f"expected tensors, but got a value of type {type(each).__name__} for {name!r}",
                "Convert the value to a tensor with torch.tensor",
                InvalidTypeError,
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
    """Convert a cache to the tensors, by name, and the JSON header of its file.

    The tensors are those of the cache, not copies, unless they are quantized for the file.

    Args:
        cache: a `CompressedCache`.
        options: the options that the cache was made with.
        model: the identity of its model.
        beside: further tensors, by name.
        codes: the quantized form for keys and values that are not quantized yet, or None.

    Raises:
        InvalidArgumentError: a stored number is not finite, so it cannot be quantized.
    """
    prompt_state = cache.prompt_state
    tensors = {f"{_BESIDE}{name}": value for name, value in beside.items()}
    tensors |= prompt_state.read_ids.truncate(prompt_state.seen_tokens).state()
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
    """Load a cache from a file, and the further tensors that were saved beside it.

    Args:
        kind: the class of the cache to make.
        path: the file.
        model: the model that filled the cache.
        policy: the policy of the saved cache if it is not one of this package; None otherwise.
        recall: where to offload evicted tokens to; None for the default.
        recall_bytes: the largest number of bytes to offload; None for no limit.
        identity: the identity of `model`, if it is known already.

    Returns:
        The cache, and the tensors that were saved beside it by name.

    Raises:
        CacheFileError: the file is missing or damaged, or its parts do not fit together.
        CacheMismatchError: another model or policy, or `recall` for a cache without recall.
    """
    file, own = read_sealed(path), identity or identity_of(model)
    with fitting_together(path):
        require_identity(own, file.notes["model"])
        cache = _rebuilt(kind, file.tensors, file.notes, model, policy, recall, recall_bytes)
    return cache, tensors_beside(file.tensors)


def tensors_beside(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that were saved beside a cache, by the names given to `save`."""
    return {
        name.removeprefix(_BESIDE): value
        for name, value in tensors.items()
        if name.startswith(_BESIDE)
    }


@contextlib.contextmanager
def fitting_together(path: Path) -> Iterator[None]:
    """Turn errors that a file with inconsistent contents causes in this block into one error.

    Raises:
        CacheFileError: the block raised one of the usual errors of Python or torch.
    """
    try:
        yield
    except SnapKVError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise wrong(
            "path",
            f"expected a file that was written by cache.save, but the parts of {str(path)!r} do "
            f"not fit together ({error!r})",
            "Save the cache again, or use a different file",
            CacheFileError,
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
    """Build a cache from the tensors and the JSON header of a file.

    Raises:
        CacheMismatchError: `recall` is given for a cache that was saved without recall, or the
            policy is another one.
        TypeError: the header contains a value of the wrong type.
    """
    options = {name: notes["options"][name] for name in _OPTIONS}
    if options["turns"] != "recall" and recall is not None:
        raise wrong(
            "recall",
            "the cache was saved without recall, so the evicted tokens are not available, but "
            f"got {str(recall)!r}",
            "Remove the argument recall",
            CacheMismatchError,
        )
    options |= {"recall": recall, "recall_bytes": recall_bytes}
    cache = kind(model, policy_of(notes["policy"], policy), **options)
    places, elsewhere = layer_devices(model), device_of(model)
    for index, (layer, saved) in enumerate(zip(cache.layers, notes["layers"], strict=True)):
        decode_layer(layer, saved, tensors, places.get(index, elsewhere))
    cache.prompt_state.prompt_end = notes["prompt_end"]
    cache.prompt_state.turn_start = notes["turn_start"]
    question_tokens = notes.get("question_tokens")  # missing in files of 0.3 and earlier
    if not isinstance(question_tokens, int | None):
        raise TypeError(f"a question of {question_tokens!r} tokens")
    cache.expect_question(question_tokens)
    cache.prompt_state.read_ids = ReadIds.restored(tensors, cache.prompt_state.rows)
    return cache


def policy_of(description: dict[str, Any], given: Policy | None = None) -> Policy:
    """Return the policy of a saved cache.

    Args:
        description: the parameters of the policy in the file, with its name.
        given: the policy that the user has passed, which must have this description; None to
            build the policy.

    Raises:
        CacheMismatchError: `given` is another policy, or the name is not known.
        TypeError: the file has a parameter of the wrong type.
    """
    if given is None:
        return _named_policy(description)
    known = (json.loads(json.dumps(own)) for own in (given.as_saved(), given.describe()))
    if description not in known:
        raise wrong(
            "policy",
            f"expected the same policy as in the saved cache, {description}, but got "
            f"{given.describe()}",
            "Remove the argument policy to use the saved policy",
            CacheMismatchError,
        )
    return given


def _named_policy(saved: dict[str, Any]) -> Policy:
    """Build the policy whose name and parameters a file contains.

    Raises:
        CacheMismatchError: this package has no policy with that name, or a gate is a file name.
        TypeError: a parameter has the wrong type.
    """
    parameters = dict(saved)
    name = parameters.pop("name")
    if name not in POLICIES:
        raise wrong(
            "policy",
            f"the cache was saved with the method {name!r}, which is not one of "
            f"{', '.join(POLICIES)}",
            "Pass the policy as an argument when you load the cache",
            CacheMismatchError,
        )
    if isinstance(parameters.get("gate"), str):  # loading a file must not open another file
        raise wrong(
            "policy",
            f"a saved cache with the method {name} must contain its gate, but it contains the "
            "name of a file",
            "Save the cache again, or use a different file",
            CacheMismatchError,
        )
    inner = {
        key: _named_policy(value) if isinstance(value, dict) and "name" in value else _frozen(value)
        for key, value in parameters.items()
    }
    if inner.get("page_tokens", 0) is None:  # 0.3.0 wrote it for AdaKV, which has no pages any more
        del inner["page_tokens"]
    try:
        return POLICIES[name](**inner)
    except InvalidTypeError as error:  # the file is wrong, not an argument of the caller's
        raise TypeError(str(error)) from error


def _frozen(value: Any) -> Any:
    """Return a parameter with tuples in place of the lists that JSON has made of them."""
    return tuple(_frozen(part) for part in value) if isinstance(value, list) else value
