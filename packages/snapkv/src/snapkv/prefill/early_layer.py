"""How many layers of a model have to read every token: what was found of it, from run to run.

`snapkv study early-layer` finds the number; `selective` starts from it. A file for
each model lies in the folder `early-layers` of `snapkv.cache_folder`, named after what tells the
model from others; what was found of the demo model comes with the package.
"""

import functools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from snapkv.cache.saving.writing import naming, replace_file
from snapkv.cache_folder import cache_folder
from snapkv.hf.identity import digest, identity_of
from snapkv.prefill.decoder import decoder_layers
from snapkv.validation import require_int

_LOG = logging.getLogger("snapkv.prefill")
_PACKAGED = Path(__file__).with_name("early_layers")


def default_early_layer(model: PreTrainedModel) -> int:
    """How many layers read every token where nobody says: what is known, else half of them."""
    return known_early_layer(model) or len(decoder_layers(model)) // 2


def known_early_layer(model: PreTrainedModel) -> int | None:
    """How many layers of this model, in any dtype, have to read every token, if it was found.

    None also where a file says nothing of the model, which is logged.
    """
    identity = identity_of(model, in_any_dtype=True)
    path = _path(identity)
    if not path.exists():
        path = _PACKAGED / path.name
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict) or found.get("model") != identity:
            raise ValueError("it does not describe this model")
        return _read(found.get("layer"), model)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        _warn_once(path, str(getattr(error, "strerror", None) or error))
        return None


def remember_early_layer(
    model: PreTrainedModel, layer: int, measured: Mapping[str, Any] | None = None
) -> Path:
    """Keep the number for later runs, in place of any; returns the file.

    `measured` says, as JSON for people, how it was found.
    """
    layer = require_int("layer", layer, minimum=1, maximum=len(decoder_layers(model)) - 1)
    identity = identity_of(model, in_any_dtype=True)
    path = _path(identity)
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    content = {"layer": layer, "model": identity, "measured": dict(measured or {})}
    replace_file(path, json.dumps(content, indent=1) + "\n")
    return path


def early_layers_folder() -> Path:
    """Where the files are."""
    return cache_folder() / "early-layers"


def _read(layer: Any, model: PreTrainedModel) -> int:
    """The number that a file of this model holds."""
    most = len(decoder_layers(model)) - 1
    if type(layer) is not int or not 1 <= layer <= most:
        raise ValueError(f"expected a layer from 1 to {most}, got {layer!r}")
    return layer


def _path(identity: Mapping[str, Any]) -> Path:
    return early_layers_folder() / f"{digest(identity)}.json"


@functools.cache
def _warn_once(path: Path, reason: str) -> None:
    _LOG.warning(
        "%s says nothing of the model (%s), so half of its layers read every token; remove it, or "
        "run snapkv study early-layer",
        path,
        reason,
    )
