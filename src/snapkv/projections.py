"""The output projection of an attention layer, whatever its family calls it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from snapkv.errors import UnsupportedModelError

_NAMES = ("o_proj", "dense", "c_proj", "out_proj")


def output_projections(model: PreTrainedModel, layers: Sequence[int]) -> dict[int, Any]:
    """The module that maps the heads' outputs to the model's width, for each of these layers.

    Raises:
        UnsupportedModelError: a layer has none under a name that is known, or none whose weight
            is a plain matrix (quantised ones are not).
    """
    found: dict[int, list[Any]] = {index: [] for index in layers}
    for module in model.get_decoder().modules():
        if "Attention" in type(module).__name__ and getattr(module, "layer_idx", None) in found:
            found[module.layer_idx] += [
                part for name in _NAMES if (part := getattr(module, name, None)) is not None
            ]
    for index, parts in found.items():
        if len(parts) != 1 or not _is_plain(parts[0]):
            raise UnsupportedModelError(
                f"model: expected attention with an output projection of plain weights called "
                f"{', '.join(_NAMES[:-1])} or {_NAMES[-1]}, got {type(model).__name__} with "
                f"{', '.join(type(part).__name__ for part in parts) or 'none'} in layer {index}; "
                "use a method that does not weigh values by it"
            )
    return {index: parts[0] for index, parts in found.items()}


def output_weight(projection: Any) -> Tensor | None:
    """(hidden, Hq * Dv) without gradient, or None where there is no projection."""
    if projection is None:
        return None
    weight: Tensor = projection.weight.detach()
    return weight.T if isinstance(projection, Conv1D) else weight


def _is_plain(projection: Any) -> bool:
    weight = getattr(projection, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and weight.is_floating_point()
