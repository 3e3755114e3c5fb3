"""Loading a model's weights, all of them or none: transformers fills gaps with random numbers."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from snapkv.errors import InvalidArgumentError


def load_complete(
    source: object, place: object, *, told_by: str, remedy: str, **options: Any
) -> Any:
    """The model, if the checkpoint has every weight that is not tied to another, in its shape.

    `source` is what the user calls it, `place` what `from_pretrained` takes, with the options.
    "config.json" or the "header" of a GGUF file tells which weights there are; `remedy` is what to
    do where they do not agree.
    """
    model, found = AutoModelForCausalLM.from_pretrained(
        place, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    missing = sorted(found["missing_keys"])
    others = _other_shapes(model) if "gguf_file" in options else {}
    others |= {key: (saved, expected) for key, saved, expected in found["mismatched_keys"]}
    wrong = [
        f"{key} {tuple(saved)} instead of {tuple(expected)}"
        for key, (saved, expected) in sorted(others.items())
    ]
    if missing or wrong:
        faults = (("without", missing), ("with", wrong))
        said = " and ".join(f"{word} {_some(names)}" for word, names in faults if names)
        raise InvalidArgumentError(
            f"model: expected every weight of its {told_by} in {str(source)!r}, got a checkpoint "
            f"{said}; {remedy}"
        )
    return model


def _other_shapes(model: Any) -> dict[str, tuple[torch.Size, torch.Size]]:
    """Weights whose shape is not that of the config; transformers 5.17 takes them out of GGUF."""
    with torch.device("meta"):
        expected = dict(type(model)(model.config).named_parameters())
    return {
        name: (weight.shape, expected[name].shape)
        for name, weight in model.named_parameters()
        if name in expected and expected[name].shape != weight.shape
    }


def _some(names: list[str], shown: int = 3) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
