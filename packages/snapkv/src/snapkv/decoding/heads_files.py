"""Files of Medusa heads, in both published layouts.

With a vocabulary matrix of their own (FasterDecoding): ``{k}.{i}.linear.weight`` and ``.bias`` of
layer i, then ``{k}.{layers}.weight``. With the model's own lm_head (text-generation-inference): the
same without the last. Beside them lies a ``config.json``; pickles are read as plain tensors or not
at all.
"""

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from snapkv.cache.saving.writing import replace_file, replacing
from snapkv.decoding.heads import MedusaHeads
from snapkv.decoding.hidden import output_projection
from snapkv.errors import InvalidArgumentError
from snapkv.validation import first_line

FILE = "medusa_lm_head.safetensors"
PICKLE = "medusa_lm_head.pt"
CONFIG = "config.json"
_ACCURACIES = "medusa_accuracies"

DEMO = "demo"
"""The name of the heads of the demo model, which come with this package."""


def load_heads(source: str, model: Any) -> MedusaHeads:
    """Read heads for a model.

    Args:
        source: a folder with ``config.json`` and ``medusa_lm_head.safetensors`` or ``.pt``, a hub
            id of one, or "demo" for the heads of the demo model.
        model: the model they were trained for; they are put on its device, in its dtype.

    Raises:
        InvalidArgumentError: no such folder, a file that is damaged or holds more than tensors,
            keys that are missing or unknown, or heads of another model's shape.
    """
    folder = _folder(source)
    config = _config(folder)
    tensors, name = _tensors(folder)
    heads = _require_count(config, "medusa_num_heads", folder)
    layers = _require_count(config, "medusa_num_layers", folder, default=1)
    own = f"0.{layers}.weight" in tensors
    _require_keys(tensors, _keys(heads, layers, own=own), name)
    _require_shapes(tensors, model, name)
    weights = _stacked(tensors, heads, layers, "weight")
    biases = _stacked(tensors, heads, layers, "bias")
    projections = None
    if own:
        projections = torch.stack([tensors[f"{head}.{layers}.weight"] for head in range(heads)])
    accuracies = tuple(map(tuple, config.get(_ACCURACIES) or ())) or None
    made = MedusaHeads(weights, biases, projections, model, accuracies)
    shared = output_projection(model).weight
    return made.to(device=shared.device, dtype=shared.dtype)


def save_heads(heads: MedusaHeads, folder: Path, *, base_model: str, **notes: Any) -> None:
    """Write heads that share the model's output projection, whole or not at all.

    Args:
        heads: what `load_heads` will give back, in bfloat16.
        folder: where to; made if it is not there.
        base_model: the model they belong to.
        notes: what else ``config.json`` says, such as how they were trained.
    """
    tensors = {
        f"{head}.{layer}.linear.{kind}": states[head, layer].to(torch.bfloat16).cpu().contiguous()
        for kind, states in (("weight", heads.weights), ("bias", heads.biases))
        for head in range(heads.num_heads)
        for layer in range(states.shape[1])
    }
    config = {
        "version": "2",
        "medusa_num_heads": heads.num_heads,
        "medusa_num_layers": heads.weights.shape[1],
        "base_model_name_or_path": base_model,
        _ACCURACIES: heads.accuracies,
        **notes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, folder / FILE)
    replace_file(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def write_tensors(
    tensors: dict[str, Tensor], path: Path, notes: dict[str, str] | None = None
) -> None:
    """Put a safetensors file in place of the one before it, if any.

    Raises:
        OutputError: it cannot be written.
    """
    with replacing(path) as partial:
        try:
            save_file(tensors, partial, metadata={"format": "pt"} | (notes or {}))
        except SafetensorError as error:
            raise OSError(str(error)) from error
        partial.chmod(0o644)  # as any other file; safetensors lets nobody else read it


def _folder(source: str) -> Path:
    if source == DEMO:
        return Path(__file__).parent / "demo_heads"
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    reason = "pass the folder that `snapkv medusa train` wrote"
    if not folder.exists() and source.count("/") == 1 and not source.startswith((".", "~")):
        try:
            return Path(snapshot_download(source, allow_patterns=[CONFIG, FILE, PICKLE]))
        except (OSError, ValueError) as error:
            reason = first_line(error)
    raise InvalidArgumentError(
        f"medusa: expected {DEMO!r}, a folder with {CONFIG} and {FILE}, or a hub id of one, "
        f"got {source!r}: {reason}"
    )


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"medusa: expected a {CONFIG} that says medusa_num_heads in {folder}, got "
            f"{type(error).__name__}: {error}; fetch the heads again"
        ) from error
    if not isinstance(config, dict):
        raise InvalidArgumentError(
            f"medusa: expected an object in {folder / CONFIG}, got {type(config).__name__}; fetch "
            "the heads again"
        )
    return config


def _require_count(
    config: dict[str, Any], name: str, folder: Path, default: int | None = None
) -> int:
    count = config.get(name, default)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise InvalidArgumentError(
            f"{name}: expected a positive integer in {folder / CONFIG}, got {count!r}; correct it "
            "or fetch the heads again"
        )
    return count


def _tensors(folder: Path) -> tuple[dict[str, Tensor], Path]:
    """The tensors of the folder's file, and its name."""
    path = folder / FILE
    try:
        if path.is_file():
            return load_file(path), path
        path = folder / PICKLE
        if path.is_file():
            return torch.load(path, map_location="cpu", weights_only=True), path
    except SafetensorError as error:
        raise InvalidArgumentError(
            f"medusa: expected a complete safetensors file, got {error} in {path}; fetch it again"
        ) from error
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise InvalidArgumentError(
            f"medusa: expected nothing but tensors in {path}, got a file that is damaged or would "
            f"run code when read; convert it to {FILE} where you trust it, or fetch it again"
        ) from error
    raise InvalidArgumentError(
        f"medusa: expected {FILE} or {PICKLE} in {folder}, got neither; pass the folder with the "
        "heads"
    )


def _keys(heads: int, layers: int, *, own: bool) -> set[str]:
    keys = {
        f"{head}.{layer}.linear.{kind}"
        for head in range(heads)
        for layer in range(layers)
        for kind in ("weight", "bias")
    }
    return keys | ({f"{head}.{layers}.weight" for head in range(heads)} if own else set())


def _require_keys(tensors: Any, expected: set[str], path: Path) -> None:
    """Refuse what would leave heads random, or silently out."""
    found = set(tensors) if isinstance(tensors, dict) else set()
    for kind, names in (("missing", expected - found), ("unknown", found - expected)):
        if names:
            shown = ", ".join(map(str, sorted(names, key=str)[:3]))
            raise InvalidArgumentError(
                f"medusa: expected the {len(expected)} tensors that {CONFIG} announces in {path}, "
                f"got {len(names)} {kind}: {shown}; correct medusa_num_heads and "
                "medusa_num_layers, or fetch the heads again"
            )


def _stacked(tensors: dict[str, Tensor], heads: int, layers: int, kind: str) -> Tensor:
    """(heads, layers, ...)."""
    places = itertools.product(range(heads), range(layers))
    rows = [tensors[f"{head}.{layer}.linear.{kind}"] for head, layer in places]
    return torch.stack(rows).view(heads, layers, *rows[0].shape)


def _require_shapes(tensors: dict[str, Tensor], model: Any, path: Path) -> None:
    V, d = output_projection(model).weight.shape
    shapes = {"linear.weight": (d, d), "linear.bias": (d,), "weight": (V, d)}
    for key, tensor in tensors.items():
        shape = shapes[key.split(".", 2)[-1]]  # behind the numbers of head and layer
        got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        if got != shape:
            raise InvalidArgumentError(
                f"medusa: expected heads for {type(model).__name__} with {d} hidden units and "
                f"{V:,} tokens, so {key} of shape {shape}, got {got} in {path}; pass the heads of "
                "this model"
            )
