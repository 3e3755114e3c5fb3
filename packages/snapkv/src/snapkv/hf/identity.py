"""Which model a saved cache, or what a study has found, belongs to."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.errors import CacheMismatchError, InvalidTypeError
from snapkv.hf.placement import weight_of

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


def unwrapped(model: Any) -> Any:
    """The model that generates: itself, or what PEFT's wrapper holds, adapters included."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def require_model(model: Any) -> None:
    """Raise unless it is a transformers model, or stands for one."""
    if not hasattr(model, "config") or not hasattr(model, "set_attn_implementation"):
        raise InvalidTypeError(
            f"model: expected a transformers PreTrainedModel, got {type(model).__name__}; load one "
            "with AutoModelForCausalLM.from_pretrained"
        )


def identity_of(model: PreTrainedModel, *, in_any_dtype: bool = False) -> dict[str, Any]:
    """What tells a model from others, ready for JSON.

    The weights are told by name, shape and sixteen values of each: any training changes some of
    them, and reading all of a large model would take longer than reading most prompts. In any
    dtype, values are rounded to bfloat16, so that a model is the same however it was loaded.
    """
    model = unwrapped(model)
    require_model(model)
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
    return digest(identity_of(model, in_any_dtype=True))


def digest(identity: Mapping[str, Any]) -> str:
    """The short name of what `identity_of` gives."""
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
    """SHA-256 over names, shapes and some bytes of all parameters, and which adapters are on.

    Codes of quantized weights may be buffers, which count, too: those of whole numbers.
    """
    digest = hashlib.sha256()
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    buffers = model.named_buffers(remove_duplicate=False)
    names += [name for name, held in buffers if not held.is_floating_point()]
    for name in sorted(names):
        owner, _, own = name.rpartition(".")
        values = weight_of(model.get_submodule(owner), own)
        digest.update(f"{name} {tuple(values.shape)}".encode())
        digest.update(_sample(values, dtype).numpy().tobytes())
    for name, module in model.named_modules():
        active = getattr(module, "active_adapters", None)  # of a layer of PEFT: those that are on
        if isinstance(active, list):
            digest.update(f"{name} {[] if module.disable_adapters else active}".encode())
    return digest.hexdigest()


def _sample(parameter: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Some values, evenly spread, as bytes on the host."""
    last = max(parameter.numel() - 1, 0)
    count = min(_SAMPLES, parameter.numel())
    places = torch.linspace(0, last, count, dtype=torch.float64).long().to(parameter.device)
    values = parameter.reshape(-1)[places].cpu().to(dtype or parameter.dtype)
    return values.contiguous().view(torch.uint8)
