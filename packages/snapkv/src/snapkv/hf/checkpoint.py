"""Loading a model only if its weights are complete; transformers would fill gaps at random."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from snapkv.errors import wrong


def load_complete(
    source: object, place: object, *, listing: str, remedy: str, **options: Any
) -> Any:
    """Load a model, and check that the checkpoint has every weight in its right shape.

    Weights that are tied to others may be missing.

    Args:
        source: the user's name for the model, for the error message.
        place: the first argument of `from_pretrained`.
        listing: what lists the weights, for the error message: "config.json", or the "header" of a
            GGUF file.
        remedy: the last sentence of the error message, without a full stop.
        options: further arguments of `from_pretrained`.

    Raises:
        InvalidArgumentError: a weight is missing or has another shape.
    """
    model, loading_info = AutoModelForCausalLM.from_pretrained(
        place, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    missing = sorted(loading_info["missing_keys"])
    others = _other_shapes(model) if "gguf_file" in options else {}
    others |= {key: (saved, expected) for key, saved, expected in loading_info["mismatched_keys"]}
    misshapen = [
        f"{key} {tuple(saved)} instead of {tuple(expected)}"
        for key, (saved, expected) in sorted(others.items())
    ]
    if missing or misshapen:
        faults = (("without", missing), ("with", misshapen))
        found_faults = " and ".join(f"{word} {_some(names)}" for word, names in faults if names)
        raise wrong(
            "model",
            f"expected every weight of its {listing} in {str(source)!r}, but got a checkpoint "
            f"{found_faults}",
            remedy,
        )
    return model


def _other_shapes(model: Any) -> dict[str, tuple[torch.Size, torch.Size]]:
    """Return the actual and the expected shape of every weight that does not fit the config.

    transformers 5.17 loads these from a GGUF file without reporting a mismatch.
    """
    with torch.device("meta"):
        expected = dict(type(model)(model.config).named_parameters())
    return {
        name: (weight.shape, expected[name].shape)
        for name, weight in model.named_parameters()
        if name in expected and expected[name].shape != weight.shape
    }


def _some(names: list[str], shown: int = 3) -> str:
    """Return the first `shown` names as one text, with the number of further names."""
    more = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
