"""Which model a saved cache belongs to, and what studies have found of a model, from run to run."""

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.cache.saving.writing import naming, replace_file
from snapkv.errors import CacheMismatchError
from snapkv.hf.placement import weight_of

Found = TypeVar("Found")

_SAMPLES = 16
_SETTINGS = (
    "model_type",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "sliding_window",
    "layer_types",
)


def identity_of(model: PreTrainedModel, *, in_any_dtype: bool = False) -> dict[str, Any]:
    """What tells a model from others, ready for JSON.

    The weights are told by name, shape and sixteen values of each: any training changes some of
    them, and reading all of a large model would take longer than reading most prompts. In any
    dtype, values are rounded to bfloat16, so that a model is the same however it was loaded.
    """
    config = model.config.get_text_config(decoder=True)
    settings = {name: getattr(config, name, None) for name in _SETTINGS}
    dtype = {} if in_any_dtype else {"dtype": str(model.dtype).removeprefix("torch.")}
    return {
        "class": type(model).__name__,
        **dtype,
        "settings": repr(sorted(settings.items())),
        "weights": _weights(model, torch.bfloat16 if in_any_dtype else None),
    }


def digest_of(model: PreTrainedModel) -> str:
    """A short name that tells a model from others, in whatever dtype it was loaded."""
    return _short(identity_of(model, in_any_dtype=True))


def _short(identity: Mapping[str, Any]) -> str:
    told = json.dumps(identity, sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def require_identity(own: Mapping[str, Any], saved: Any) -> None:
    """Refuse a model other than the one that filled a cache; both as `identity_of` gives them."""
    for part, value in own.items():
        other = saved.get(part) if isinstance(saved, dict) else None
        if other == value:
            continue
        expected, got = f", with its {part}", f"a {own['class']} with other {part}"
        if part in ("class", "dtype"):
            expected, got = f" ({part} {other})", f"{part} {value}"
        raise CacheMismatchError(
            f"model: expected the model that filled the cache{expected}, got {got}; load the model "
            "the cache was saved with"
        )


@torch.no_grad()
def _weights(model: PreTrainedModel, dtype: torch.dtype | None) -> str:
    """SHA-256 over all parameters' names and shapes and some of their values' bytes."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters(remove_duplicate=False)):
        owner, _, own = name.rpartition(".")
        values = weight_of(model.get_submodule(owner), own)
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(_sample(values, dtype).numpy().tobytes())
    return digest.hexdigest()


def _sample(parameter: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Some values, evenly spread, as bytes on the host."""
    last = max(parameter.numel() - 1, 0)
    count = min(_SAMPLES, parameter.numel())
    places = torch.linspace(0, last, count, dtype=torch.float64).long().to(parameter.device)
    values = parameter.reshape(-1)[places].cpu().to(dtype or parameter.dtype)
    return values.contiguous().view(torch.uint8)


@dataclass(frozen=True, kw_only=True)
class Remembered(Generic[Found]):
    """One kind of thing that is found of models: a file for each of them in a folder.

    A file is named after what tells the model from others, in whatever dtype it was loaded.
    """

    name: str  # of it in the files
    study: str  # which finds it
    folder: Callable[[], Path]  # where the files of this machine are, asked each time
    packaged: Path  # where those are that come with the package
    read: Callable[[Any, PreTrainedModel], Found]  # out of JSON; ValueError where it is no such
    otherwise: str  # what is done where nothing is known, for messages
    log: logging.Logger

    def of(self, model: PreTrainedModel) -> Found | None:
        """What was found of this model; None where a file says nothing of it, which is logged."""
        identity = identity_of(model, in_any_dtype=True)
        path = self._path(identity)
        if not path.exists():
            path = self.packaged / path.name
        try:
            found = json.loads(path.read_bytes())
            if not isinstance(found, dict) or found.get("model") != identity:
                raise ValueError("it does not describe this model")
            return self.read(found.get(self.name), model)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            reason = str(getattr(error, "strerror", None) or error)
            _warn_once(self.log, path, reason, self.otherwise, self.study)
            return None

    def keep(
        self, model: PreTrainedModel, found: Any, measured: Mapping[str, Any] | None = None
    ) -> Path:
        """Keep what was found, as JSON, for later runs; `measured` says how. Returns the file."""
        identity = identity_of(model, in_any_dtype=True)
        path = self._path(identity)
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        content = {self.name: found, "model": identity, "measured": dict(measured or {})}
        replace_file(path, json.dumps(content, indent=1) + "\n")
        return path

    def _path(self, identity: Mapping[str, Any]) -> Path:
        return self.folder() / f"{_short(identity)}.json"


@functools.cache
def _warn_once(log: logging.Logger, path: Path, reason: str, otherwise: str, study: str) -> None:
    said = "%s says nothing of the model (%s), so %s; remove it, or run snapkv study %s"
    log.warning(said, path, reason, otherwise, study)
