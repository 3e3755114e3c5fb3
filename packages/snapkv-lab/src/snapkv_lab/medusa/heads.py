"""Medusa heads: small layers that draft the tokens after the next one, and their files.

Medusa (Cai et al., 2024), section 2.1.1. From the state h that the model's output projection
receives, head k drafts the token k + 1 positions ahead: ``lm_head_k(r_n(... r_1(h)))`` with ``r(x)
= x + SiLU(W x + b)``.

Files have one of the two published layouts. With an own vocabulary matrix per head
(FasterDecoding): ``{k}.{i}.linear.weight`` and ``.bias`` of layer i, then ``{k}.{layers}.weight``.
With the model's own lm_head (text-generation-inference): the same without the last tensor. A
``config.json`` lies beside them. Pickles are only read if they contain nothing but tensors.
"""

import contextlib
import itertools
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import silu

from snapkv.cache.saving.writing import replace_file, replacing
from snapkv.errors import UnsupportedModelError, wrong
from snapkv.hf.model_parts import observing_inputs
from snapkv.hf.placement import device_of
from snapkv.validation import first_line
from snapkv_lab.medusa.tree import HEAD_RANKS

FILE = "medusa_lm_head.safetensors"
PICKLE = "medusa_lm_head.pt"
CONFIG = "config.json"
_ACCURACIES = "medusa_accuracies"

DEMO = "demo"
"""The name of the heads for the demo model, which are part of this package."""

ACCURACIES = (
    (0.42, 0.13, 0.07, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01, 0.01),
    (0.26, 0.10, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01, 0.01),
    (0.18, 0.08, 0.05, 0.03, 0.02, 0.02, 0.01, 0.01, 0.01, 0.01),
)
"""How often a head's choices are right, by rank, for files that do not say it. The last row holds
for all further heads.
"""


class MedusaHeads(nn.Module):
    """The Medusa heads of a model: small layers, each of which drafts one of the tokens after the
    next.

    Args:
        weights: (heads, layers, d, d), where d is the size of the model's hidden states.
        biases: (heads, layers, d).
        projections: (heads, V, d), one matrix for the V tokens of the vocabulary per head; None if
            the heads share the model's own output projection.
        model: the model that the heads belong to.
        accuracies: for each head, how often its choice of each rank was right in a measurement,
            from 0 to 1, the most likely choice first; None for `ACCURACIES`.

    Raises:
        UnsupportedModelError: the model has no output projection.
    """

    def __init__(
        self,
        weights: Tensor,
        biases: Tensor,
        projections: Tensor | None,
        model: Any,
        accuracies: tuple[tuple[float, ...], ...] | None = None,
    ) -> None:
        super().__init__()
        self.weights = nn.Parameter(weights, requires_grad=False)
        self.biases = nn.Parameter(biases, requires_grad=False)
        self.projections = None
        if projections is not None:
            self.projections = nn.Parameter(projections, requires_grad=False)
        self._shared = [output_projection(model)]  # in a list, so it is no submodule of the heads
        self.accuracies = accuracies or tuple(
            ACCURACIES[min(head, len(ACCURACIES) - 1)] for head in range(len(weights))
        )

    @classmethod
    def untrained(cls, model: Any, num_heads: int) -> "MedusaHeads":
        """Create heads that have not been trained, whose weights are all zeros in float32.

        They have one layer each and share the model's output projection. They draft the token that
        the model itself would choose next.

        Raises:
            UnsupportedModelError: the model has no output projection.
        """
        shared = output_projection(model)
        d, device = shared.weight.shape[1], device_of(shared)
        weights = torch.zeros(num_heads, 1, d, d, dtype=torch.float32, device=device)
        return cls(weights, torch.zeros_like(weights[..., 0]), None, model)

    @property
    def num_heads(self) -> int:
        """The number of tokens that are drafted after the next token."""
        return len(self.weights)

    def states(self, hidden: Tensor) -> Tensor:
        """Return the states that are passed to the output projection of each head.

        Args:
            hidden: (..., d), hidden states of the model.

        Returns:
            (..., heads, d), in the dtype of the heads.
        """
        states = hidden.to(self.weights)[..., None, :].expand(
            *hidden.shape[:-1], self.num_heads, -1
        )
        for layer in range(self.weights.shape[1]):
            turned = torch.einsum("...kd,ked->...ke", states, self.weights[:, layer])
            states = states + silu(turned + self.biases[:, layer])
        return states

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits of all heads.

        Args:
            hidden: (..., d), hidden states as `record_last_states` records them.

        Returns:
            (..., heads, V), for the V tokens of the vocabulary.
        """
        states = self.states(hidden)
        if self.projections is not None:
            return torch.einsum("...kd,kvd->...kv", states, self.projections)
        (shared,) = self._shared
        logits: Tensor = shared(states.to(shared.weight.dtype))
        return logits

    @torch.no_grad()
    def guesses(self, hidden: Tensor) -> Tensor:
        """Return the most likely tokens of each head.

        Args:
            hidden: (..., d), as `record_last_states` records them.

        Returns:
            (..., heads, `HEAD_RANKS`) int64, the most likely first.
        """
        best: Tensor = self(hidden).topk(HEAD_RANKS, dim=-1).indices
        return best


class LastStates:
    """The last states of the model, which are the input of its output projection.

    `value` is (B, N, d) for the N tokens with logits of the latest forward pass. It does not exist
    before the first pass.
    """

    value: Tensor


@contextlib.contextmanager
def record_last_states(model: Any) -> Iterator[LastStates]:
    """Record the input of the output projection within this block.

    Each forward pass of this thread replaces `value` of the yielded object.

    Raises:
        UnsupportedModelError: the model has no output projection.
    """
    last = LastStates()
    with observing_inputs(output_projection(model), lambda states: setattr(last, "value", states)):
        yield last


def output_projection(model: Any) -> Any:
    """Return the module that computes the logits from the last hidden states.

    Raises:
        UnsupportedModelError: the model has none.
    """
    projection = model.get_output_embeddings()
    if projection is None:
        problem = f"the model {type(model).__name__} does not have an output projection (lm_head)"
        raise wrong("model", problem, "Use a model for text generation", UnsupportedModelError)
    return projection


def load_heads(source: str, model: Any) -> MedusaHeads:
    """Read heads for a model. They are moved to its device and converted to its dtype.

    Args:
        source: a folder with ``config.json`` and ``medusa_lm_head.safetensors`` or ``.pt``, the hub
            id of one, or "demo" for the heads of the demo model.
        model: the model that the heads were trained for.

    Raises:
        InvalidArgumentError: the folder is missing or cannot be downloaded, a file is missing, is
            damaged or contains more than tensors, keys are missing or unknown, or the heads have
            the shape of another model.
        UnsupportedModelError: the model has no output projection.
    """
    folder = _folder(source)
    config = {"medusa_num_layers": 1} | _config(folder)
    tensors, path = _tensors(folder)
    heads, layers = (_count(config, f"medusa_num_{kind}", folder) for kind in ("heads", "layers"))
    own = f"0.{layers}.weight" in tensors
    _require_tensors(tensors, heads, layers, own, model, path)
    weights, biases = (
        torch.stack(
            [
                torch.stack([tensors[f"{head}.{layer}.linear.{kind}"] for layer in range(layers)])
                for head in range(heads)
            ]
        )
        for kind in ("weight", "bias")
    )
    projections = None
    if own:
        projections = torch.stack([tensors[f"{head}.{layers}.weight"] for head in range(heads)])
    accuracies = tuple(map(tuple, config.get(_ACCURACIES) or ())) or None
    shared = output_projection(model)
    result = MedusaHeads(weights, biases, projections, model, accuracies)
    return result.to(device=device_of(shared), dtype=shared.weight.dtype)


def save_heads(heads: MedusaHeads, folder: Path, *, base_model: str, **notes: Any) -> None:
    """Save heads in a folder, in the format of Medusa.

    Weights are written in bfloat16, and each file is written completely or not at all.

    Args:
        heads: the heads; `load_heads` reads them back.
        folder: where they are written; it is made if it is missing.
        base_model: the model that they belong to.
        notes: further entries of ``config.json``, such as how they were trained.

    Raises:
        OutputError: a file cannot be written.
    """
    layers = heads.weights.shape[1]
    tensors = {
        f"{head}.{layer}.linear.{kind}": states[head, layer]
        for kind, states in (("weight", heads.weights), ("bias", heads.biases))
        for head in range(heads.num_heads)
        for layer in range(layers)
    }
    for head, projection in enumerate(heads.projections if heads.projections is not None else ()):
        tensors[f"{head}.{layers}.weight"] = projection
    config = {
        "version": "2",
        "medusa_num_heads": heads.num_heads,
        "medusa_num_layers": layers,
        "base_model_name_or_path": base_model,
        _ACCURACIES: heads.accuracies,
        **notes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    written = {
        name: tensor.to(torch.bfloat16).cpu().contiguous() for name, tensor in tensors.items()
    }
    write_tensors(written, folder / FILE)
    replace_file(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def write_tensors(
    tensors: dict[str, Tensor], path: Path, notes: dict[str, str] | None = None
) -> None:
    """Write a dictionary of tensors to a safetensors file. An existing file is replaced, completely
    or not at all.

    Args:
        tensors: the tensors by name.
        path: the file, in a folder that exists.
        notes: further metadata of the file.

    Raises:
        OutputError: the file cannot be written.
    """
    with replacing(path) as partial:
        try:
            save_file(tensors, partial, metadata={"format": "pt"} | (notes or {}))
        except SafetensorError as error:
            raise OSError(str(error)) from error
        partial.chmod(0o644)  # like any other file; safetensors makes it private


def _folder(source: str) -> Path:
    """Return the path of the folder that contains the heads.

    Args:
        source: a folder, the hub id of one, which is downloaded into the cache of the hub, or
            "demo".

    Raises:
        InvalidArgumentError: there is no such folder, or it cannot be downloaded.
    """
    if source == DEMO:
        return Path(__file__).parent / "demo_heads"
    folder = Path(source).expanduser()
    if source.strip() and folder.is_dir():
        return folder
    reason = "there is no such folder"
    if not folder.exists() and source.count("/") == 1 and not source.startswith((".", "~")):
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(source, allow_patterns=[CONFIG, FILE, PICKLE]))
        except (OSError, ValueError) as error:
            reason = first_line(error)
    expected = f"expected {DEMO!r}, a folder with {CONFIG} and {FILE}, or a hub id of one"
    remedy = "Use a folder that was written by `snapkv medusa train`"
    raise wrong("medusa", f"{expected}, but got {source!r}: {reason}", remedy)


def _config(folder: Path) -> dict[str, Any]:
    """Read the ``config.json`` of a folder.

    Raises:
        InvalidArgumentError: it is missing, or is not a JSON object.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"{type(config).__name__}, no object")
    except (OSError, ValueError) as error:
        problem = f"the {CONFIG} in {folder} could not be read: {type(error).__name__}: {error}"
        raise wrong("medusa", problem, "Download the heads again") from error
    return config


def _count(config: dict[str, Any], name: str, folder: Path) -> int:
    """Return the positive integer that the configuration has under `name`.

    Args:
        config: the content of ``config.json``.
        name: the name of the entry.
        folder: the folder of the file, for the error message.

    Raises:
        InvalidArgumentError: the entry is missing or is something else.
    """
    count = config.get(name)
    if type(count) is not int or count < 1:
        problem = f"expected a positive integer in {folder / CONFIG}, but got {count!r}"
        raise wrong(name, problem, "Correct the value, or download the heads again")
    return count


def _tensors(folder: Path) -> tuple[dict[str, Tensor], Path]:
    """Load the tensors from the folder and return them with the path of the file.

    The tensors are on the CPU. A pickle may contain something else than a dictionary, which the
    caller must check.

    Raises:
        InvalidArgumentError: there is no file, or it is damaged or contains more than tensors.
    """
    path, pickled = folder / FILE, folder / PICKLE
    expected, remedy = f"{FILE} or {PICKLE}", "Use the folder that contains the heads"
    try:
        if path.is_file():
            expected, remedy = f"a complete safetensors file {path}", "Download the file again"
            return load_file(path), path
        if pickled.is_file():
            expected = f"nothing but tensors in {pickled}, which is damaged or would run code"
            remedy = f"If you trust the file, convert it to {FILE}, or download it again"
            return torch.load(pickled, map_location="cpu", weights_only=True), pickled
        raise EOFError("neither")
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        problem = f"expected {expected} in {folder}, but got {first_line(error)}"
        raise wrong("medusa", problem, remedy) from error


def _require_tensors(
    tensors: Any, heads: int, layers: int, own: bool, model: Any, path: Path
) -> None:
    """Check that a file contains exactly the tensors of the heads, in the right shapes.

    Args:
        tensors: the tensors by name, or what else a pickle contained.
        heads: the number of heads.
        layers: the number of layers of each head.
        own: whether each head has its own vocabulary matrix.
        model: the model that the heads are for.
        path: the file, for the error message.

    Raises:
        InvalidArgumentError: a tensor is missing, unknown or of another shape.
    """
    V, d = output_projection(model).weight.shape
    linear = {"weight": (d, d), "bias": (d,)}
    shapes: dict[str, tuple[int, ...]] = {
        f"{head}.{layer}.linear.{kind}": shape
        for head, layer in itertools.product(range(heads), range(layers))
        for kind, shape in linear.items()
    }
    if own:
        shapes |= {f"{head}.{layers}.weight": (V, d) for head in range(heads)}
    got = {
        key: tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        for key, tensor in (tensors.items() if isinstance(tensors, dict) else ())
    }
    others = sorted(map(str, (key for key in shapes | got if shapes.get(key) != got.get(key))))
    if others:
        key = others[0]
        raise wrong(
            "medusa",
            f"expected for {type(model).__name__} with {d} hidden units and {V:,} tokens the "
            f"{len(shapes)} tensors that {CONFIG} announces in {path}, but got {len(others)} "
            f"others such as {key}, {got.get(key, 'missing')} instead of {shapes.get(key, 'none')}",
            "Pass the heads of this model, or correct medusa_num_heads and medusa_num_layers",
        )
