"""How many layers of a model have to read every token: what was found of it, from run to run.

`snapkv study early-layer` finds the number; `selective` and `gemfilter` start from it. A file for
each model lies in the folder `early-layers` of `snapkv.cache_folder`, named after what tells the
model from others; what was found of the demo model comes with the package.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from snapkv.cache_folder import cache_folder
from snapkv.hf.identity import Remembered
from snapkv.prefill.decoder import decoder_layers
from snapkv.validation import require_int


def default_early_layer(model: PreTrainedModel) -> int:
    """How many layers read every token where nobody says: what is known, else half of them."""
    return known_early_layer(model) or len(decoder_layers(model)) // 2


def known_early_layer(model: PreTrainedModel) -> int | None:
    """How many layers of this model, in any dtype, have to read every token, if it was found."""
    return _KNOWN.of(model)


def remember_early_layer(
    model: PreTrainedModel, layer: int, measured: Mapping[str, Any] | None = None
) -> Path:
    """Keep the number for later runs, in place of any; returns the file.

    `measured` says, as JSON for people, how it was found.
    """
    require_int("layer", layer, minimum=1, maximum=len(decoder_layers(model)) - 1)
    return _KNOWN.keep(model, layer, measured)


def early_layers_folder() -> Path:
    """Where the files are."""
    return cache_folder() / "early-layers"


def _read(layer: Any, model: PreTrainedModel) -> int:
    """The number that a file of this model holds."""
    most = len(decoder_layers(model)) - 1
    if type(layer) is not int or not 1 <= layer <= most:
        raise ValueError(f"expected a layer from 1 to {most}, got {layer!r}")
    return layer


_KNOWN = Remembered(
    name="layer",
    study="early-layer",
    folder=lambda: early_layers_folder(),
    packaged=Path(__file__).with_name("early_layers"),
    read=_read,
    otherwise="half of its layers read every token",
    log=logging.getLogger("snapkv.prefill"),
)
