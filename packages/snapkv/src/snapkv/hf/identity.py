"""The identity of a model, which tells whether a saved cache or a fitted gate belongs to it."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.errors import CacheMismatchError, InvalidTypeError, wrong
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
    """Return the base model inside a `PeftModel`, or the model itself if it is no `PeftModel`.

    The adapters stay in the model that is returned.
    """
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def require_model(model: Any) -> None:
    """Raise unless `model` is a transformers model or behaves like one.

    Raises:
        InvalidTypeError: it has no `config` or no `set_attn_implementation`.
    """
    if not hasattr(model, "config") or not hasattr(model, "set_attn_implementation"):
        raise wrong(
            "model",
            f"expected a PreTrainedModel of transformers, but got {type(model).__name__}",
            "Use AutoModelForCausalLM.from_pretrained to load a model",
            InvalidTypeError,
        )


def identity_of(model: PreTrainedModel, *, in_any_dtype: bool = False) -> dict[str, Any]:
    """Return a dict that distinguishes a model from others, which JSON can represent.

    It contains a hash over the name, the shape and sixteen values of every weight. Training changes
    some of these values, and reading all weights of a large model would take longer than reading
    most prompts.

    Args:
        model: the model, or a `PeftModel` around it.
        in_any_dtype: whether the identity is the same in every dtype; values are then rounded to
            bfloat16 before they are hashed.

    Raises:
        InvalidTypeError: `model` is not a transformers model.
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
    """Return a name of 32 hex digits that identifies a model, whatever dtype it was loaded in.

    Raises:
        InvalidTypeError: `model` is not a transformers model.
    """
    return digest(identity_of(model, in_any_dtype=True))


def digest(identity: Mapping[str, Any]) -> str:
    """Return the first 32 hex digits of the SHA-256 hash of an identity."""
    text = json.dumps(identity, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def require_identity(own: Mapping[str, Any], saved: Any) -> None:
    """Raise unless a model is the one that filled a saved cache.

    Args:
        own: the identity of the model; see `identity_of`.
        saved: the identity in the file.

    Raises:
        CacheMismatchError: the identities differ; the message names the first difference.
    """
    for part, value in own.items():
        other = saved.get(part) if isinstance(saved, dict) else None
        if other == value:
            continue
        expected, got = f", with its {part}", f"a {own['class']} with other {part}"
        if part in ("class", "dtype"):
            expected, got = f" ({part} {other})", f"{part} {value}"
        raise wrong(
            "model",
            f"expected the model that filled the cache{expected}, but got {got}",
            "Use the model with which the cache was saved",
            CacheMismatchError,
        )


@torch.no_grad()
def _weights(model: PreTrainedModel, dtype: torch.dtype | None) -> str:
    """Return a SHA-256 hash over the weights of a model and the names of its active adapters.

    Integer buffers are included, because quantized weights may be stored in them.

    Args:
        model: the model.
        dtype: the dtype to which values are rounded first; None for their own.
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
        active = getattr(module, "active_adapters", None)  # a list in the layers of PEFT
        if isinstance(active, list):
            digest.update(f"{name} {[] if module.disable_adapters else active}".encode())
    return digest.hexdigest()


def _sample(parameter: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the bytes of up to sixteen evenly spaced values of a tensor.

    Returns:
        (N,) uint8 on the host.
    """
    last = max(parameter.numel() - 1, 0)
    count = min(_SAMPLES, parameter.numel())
    places = torch.linspace(0, last, count, dtype=torch.float64).long().to(parameter.device)
    values = parameter.reshape(-1)[places].cpu().to(dtype or parameter.dtype)
    return values.contiguous().view(torch.uint8)
