"""How many layers of a model have to read every token: what was found of it, from run to run.

`snapkv study early-layer` finds the number; `selective` and `gemfilter` start from it. A file for
each model lies in the folder `early-layers` of `snapkv.cache_folder`, named after what tells the
model from others; what was found of the demo model comes with the package.
"""

import functools
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from snapkv.cache.saving.writing import naming, replace_file
from snapkv.cache_folder import cache_folder
from snapkv.hf.identity import identity_of
from snapkv.prefill.decoder import decoder_layers
from snapkv.validation import require_int

_log = logging.getLogger("snapkv.prefill")
_PACKAGED = Path(__file__).with_name("early_layers")


def default_early_layer(model: PreTrainedModel) -> int:
    """How many layers read every token where nobody says: what is known, else half of them."""
    return known_early_layer(model) or len(decoder_layers(model)) // 2


def known_early_layer(model: PreTrainedModel) -> int | None:
    """How many layers of this model have to read every token, if a search has found it.

    A file that cannot be read, or says something else, counts as none; the log of `snapkv.prefill`
    names it once, as a warning.

    Args:
        model: in whatever dtype it was loaded.
    """
    identity = _identity(model)  # reads a little of every weight, so once
    path = _file_of(identity)
    if not path.exists():
        path = _PACKAGED / path.name
    try:
        return _layer_in(path.read_bytes(), identity, len(decoder_layers(model)) - 1)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _warn_once(path, str(getattr(error, "strerror", None) or error))
        return None


def remember_early_layer(
    model: PreTrainedModel, layer: int, measured: Mapping[str, Any] | None = None
) -> Path:
    """Keep the number for later runs, in place of any that is there.

    Args:
        model: which it was found of.
        layer: how many of its layers read every token, at least one and not all.
        measured: how it was found, as JSON, for people who read the file.

    Returns:
        The file.

    Raises:
        InvalidArgumentError: no number of layers of that model.
        OutputError: the file cannot be written; the one that was there still is.
    """
    require_int("layer", layer, minimum=1, maximum=len(decoder_layers(model)) - 1)
    identity = _identity(model)
    path = _file_of(identity)
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    found = {"layer": layer, "model": identity, "measured": dict(measured or {})}
    replace_file(path, json.dumps(found, indent=1) + "\n")
    return path


def _identity(model: PreTrainedModel) -> dict[str, Any]:
    return identity_of(model, in_any_dtype=True)


def _file_of(identity: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return early_layers_folder() / f"{digest[:32]}.json"


def early_layers_folder() -> Path:
    """Where the files are."""
    return cache_folder() / "early-layers"


def _layer_in(data: bytes, identity: Mapping[str, Any], most: int) -> int:
    """The number that a file of this model holds, which has one layer more than `most`.

    Raises:
        ValueError: another file.
    """
    found = json.loads(data)
    if not isinstance(found, dict) or found.get("model") != identity:
        raise ValueError("it does not describe this model")
    layer = found.get("layer")
    if type(layer) is not int or not 1 <= layer <= most:
        raise ValueError(f"expected a layer from 1 to {most}, got {layer!r}")
    return layer


@functools.cache
def _warn_once(path: Path, reason: str) -> None:
    _log.warning(
        "%s says nothing of the model's layers (%s), so half of them read every token; remove it, "
        "or run snapkv study early-layer",
        path,
        reason,
    )
