"""Find the published sizes of a model by its name, for plans and benchmarks.

`shapes.toml` repeats the models' `config.json`, including positions; `tests/plan/test_shapes.py`
builds each model from its configuration and compares.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

from snapkv_app.plan.footprint import Footprint, footprint_of


@dataclass(frozen=True)
class Shape:
    """The published sizes of a model."""

    repository: str  # its id on the hub
    family: str  # `model_type` in its `config.json`
    parameters: int  # of the checkpoint
    config: dict[str, Any]  # the other settings in its `config.json`

    def footprint(self, dtype: str | None = None) -> Footprint:
        """Compute the footprint of the model, in bfloat16 unless `dtype` names another dtype.

        Raises:
            InvalidArgumentError: `dtype` is not a key of `ITEM_BYTES`.
        """
        config = {"dtype": "bfloat16", "model_type": self.family, **self.config}
        return footprint_of(config, dtype=dtype, parameters=self.parameters)


def _published() -> Iterator[tuple[str, Shape]]:
    """Yield the name of every shape in `shapes.toml`, and the shape."""
    text = resources.files("snapkv_app.plan").joinpath("shapes.toml").read_text(encoding="utf-8")
    for name, entry in tomllib.loads(text).items():
        repository, family, parameters = map(entry.pop, ("repository", "model_type", "parameters"))
        entry.pop("source", None)
        config = {key: None if value == "null" else value for key, value in entry.items()}
        yield name, Shape(repository, family, parameters, config)


SHAPES: dict[str, Shape] = dict(_published())
"""All shapes by name."""


def shape_of(name: str) -> str | None:
    """Return the key in `SHAPES` of the shape with a name or hub id; None if there is none.

    Upper and lower case make no difference.
    """
    known = {shape: shape for shape in SHAPES}
    known |= {published.repository.lower(): shape for shape, published in SHAPES.items()}
    return known.get(name.lower())


def described(shape: str) -> dict[str, Any]:
    """Describe the sizes of the cache and the weights of a published shape, for a table.

    `shape` must be a key of `SHAPES`.

    Returns:
        A new dict. "repository" is the hub id, and "weights" the dtype or the quantization.
        "parameters", "layers", "growing_layers" (those with full attention), "sliding_layers" and
        "kv_heads" are numbers of these. "sliding_window" is its tokens, or None without one.
        "head_dim" is the size of a head, or of the one latent that all heads share.
        "kv_bytes_per_token" is for keys and values of 16 bits in the growing layers. "positions" is
        the most tokens, or None without a limit.
    """
    published = SHAPES[shape]
    model = published.footprint()
    layer, sliding = model.full_layers[0], model.sliding_layers
    is_latent = layer.key_width != layer.value_width
    return {
        "repository": published.repository,
        "parameters": published.parameters,
        "weights": model.quantization or model.dtype,
        "layers": model.layers,
        "growing_layers": len(model.full_layers),
        "sliding_layers": len(sliding),
        "sliding_window": sliding[0].most_tokens + 1 if sliding else None,
        "kv_heads": layer.heads,
        "head_dim": layer.key_width + (layer.value_width if is_latent else 0),
        "kv_bytes_per_token": model.token_bytes,
        "positions": model.max_positions,
    }
