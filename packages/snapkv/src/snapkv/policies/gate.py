"""A gate: weights that predict how much attention a token will get.

The prediction reads the token's key, value and position. There is one set of weights for each KV
head, fitted to a model by `snapkv study fit-gate`. The file of a gate is in the safetensors format,
contains no code, and names the model that the gate was fitted to.
"""

import base64
import binascii
import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from snapkv.errors import InvalidArgumentError, InvalidTypeError, wrong
from snapkv.policies.states import PromptLayer

FORMAT = "snapkv gate 1"
MOST_BYTES = 1 << 24
"""The largest file of a gate, in bytes; the largest models need two million."""

_REMEDY = "Run `snapkv study fit-gate` to train a gate"
_LEAST_NORM = 1e-6
_AT_ONCE = 4096
_SIZES = ("layers", "heads", "key_size", "value_size")


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The weights of a linear model that predicts how much attention each token will receive.

    There is one set of weights per layer and KV head, and one weight per number of `features`.

    Attributes:
        layers: the number of layers with full attention.
        heads: the number of KV heads of each layer.
        key_size, value_size: channels of a head's keys and values.
        model: the digest that identifies the model, see `snapkv.hf.identity.digest_of`; "" for any
            model. It is not compared here.
        data: (layers, heads, features) float16 as little-endian bytes, a weight for each of
            `features`.

    Raises:
        InvalidArgumentError: `data` has the wrong size, there are no weights, or some are not
            finite.
    """

    layers: int
    heads: int
    key_size: int
    value_size: int
    model: str = ""
    data: bytes = field(repr=False)

    def __post_init__(self) -> None:
        features = feature_count(self.key_size, self.value_size)
        expected = 2 * self.layers * self.heads * features
        if len(self.data) != expected or expected == 0:
            sizes = f"{self.layers} layers with {self.heads} KV heads"
            problem = f"expected {expected:,} bytes for {sizes}, but got {len(self.data):,} bytes"
            raise wrong("gate", problem, _REMEDY)
        if not self.weights.isfinite().all():
            raise wrong("gate", "some of the weights of the gate are not finite numbers", _REMEDY)

    @classmethod
    def of(cls, weights: Tensor, key_size: int, value_size: int, model: str = "") -> Self:
        """Create a gate from a tensor of weights, which are rounded to float16.

        Args:
            weights: (layers, heads, features) of any dtype, on any device.
            key_size: channels of a head's keys.
            value_size: channels of a head's values.
            model: as in `Gate`.

        Raises:
            InvalidArgumentError: there are more or fewer weights than features, or some are not
                finite in float16.
        """
        layers, heads, _ = weights.shape
        data = weights.detach().cpu().to(torch.float16).contiguous().view(torch.uint8)
        sizes = {"layers": layers, "heads": heads, "key_size": key_size, "value_size": value_size}
        return cls(**sizes, model=model, data=data.numpy().tobytes())

    @functools.cached_property
    def weights(self) -> Tensor:
        """The weights as a tensor on the CPU, which must not be changed.

        Shape: (layers, heads, features) float32.
        """
        flat = torch.frombuffer(bytearray(self.data), dtype=torch.float16)
        return flat.float().view(self.layers, self.heads, -1)

    @property
    def digest(self) -> str:
        """The SHA-256 hash of the weights as a hexadecimal string."""
        return hashlib.sha256(self.data).hexdigest()

    def log_scores(self, layer: PromptLayer) -> Tensor:
        """Predict the logarithm of the score of each token in a layer.

        The scores of padding mean nothing.

        Args:
            layer: a single layer with `rotation`, not several that are stacked.

        Returns:
            (B, heads, T) float32, higher is better.

        Raises:
            InvalidArgumentError: the gate is of a model with other layers, heads or head sizes.
        """
        self._require_shapes(layer)
        weights = self.weights[layer.depth, :, :, None].to(layer.keys.device)
        parts = [features(layer, part) @ weights for part in _pieces(layer.keys.shape[2])]
        return torch.cat(parts, dim=2)[..., 0]

    def _require_shapes(self, layer: PromptLayer) -> None:
        """Check that the layer has the sizes that the gate was fitted to.

        Raises:
            InvalidArgumentError: the number of layers or heads, or the size of a key or value,
                differs.
        """
        own = (self.layers, self.heads, self.key_size, self.value_size)
        got = (layer.num_layers, *layer.keys.shape[1::2], layer.values.shape[3])
        if own != got:
            sizes = "the numbers of layers and KV heads, and the sizes of a key and a value"
            problem = f"expected {got}, which are {sizes} of the model, but got {own}"
            raise wrong("gate", problem, "Use a gate that was trained for this model")

    def describe(self) -> str:
        """Return the first 16 characters of the hash of the weights, as a name for reports."""
        return self.digest[:16]

    def as_saved(self) -> dict[str, Any]:
        """Return the sizes, the model and the weights as JSON values.

        The weights are text in base64. `read_gate` converts the result back to a gate.
        """
        sizes = {name: getattr(self, name) for name in _SIZES}
        return sizes | {"model": self.model, "data": base64.b64encode(self.data).decode()}

    def as_file(self) -> bytes:
        """Return the contents of a safetensors file with this gate, which `read_gate` can read."""
        flat = torch.frombuffer(bytearray(self.data), dtype=torch.float16)
        metadata = {name: str(getattr(self, name)) for name in _SIZES}
        metadata |= {"format": FORMAT, "model": self.model, "sha256": self._seal()}
        return save({"weights": flat.view(self.layers, self.heads, -1)}, metadata)

    def _seal(self) -> str:
        """Return the hash of the weights, the sizes and the model, to detect a damaged file."""
        metadata = repr([getattr(self, name) for name in (*_SIZES, "model")])
        return hashlib.sha256(metadata.encode() + self.data).hexdigest()


def feature_count(key_size: int, value_size: int) -> int:
    """Return the number of features that a gate reads for each token."""
    return 2 * key_size + value_size + 6


def features(layer: PromptLayer, part: slice) -> Tensor:
    """Compute the features of the tokens in the given slots.

    The features are the key before rotary embedding, its squares, the value, and the logarithms of
    both norms; then log(i + 1), i / N and log(N - i), if the token is number i, from 0, of the N
    tokens of its row; and 1. Padding counts as token 0.

    Args:
        layer: a layer with `rotation`.
        part: the slots, with both of its ends given.

    Returns:
        (B, Hkv, slots, features) float32.
    """
    assert layer.rotation is not None
    keys, values = layer.keys[:, :, part], layer.values[:, :, part].float()
    tokens = layer.row_tokens[:, None]
    places = torch.arange(part.start, part.stop, device=keys.device) - layer.keys.shape[2] + tokens
    places = places.clamp(min=0)
    keys = layer.rotation(keys, -places)
    places, tokens = places.float(), tokens.float()
    norms = [
        torch.linalg.vector_norm(states, dim=-1, keepdim=True).clamp(min=_LEAST_NORM).log()
        for states in (keys, values)
    ]
    placed = [(places + 1).log(), places / tokens, (tokens - places).log(), torch.ones_like(places)]
    of_row = torch.stack(placed, dim=-1)[:, None]
    of_row = of_row.expand(-1, keys.shape[1], -1, -1)
    return torch.cat([keys, keys.square(), values, *norms, of_row], dim=-1)


def _pieces(slots: int) -> list[slice]:
    """Split the slots into ranges, because the features of all slots take too much memory."""
    return [slice(at, min(at + _AT_ONCE, slots)) for at in range(0, slots, _AT_ONCE)]


def read_gate(given: object) -> Gate:
    """Return the gate that the user has passed.

    Args:
        given: a gate, the name of a file, or a dictionary that `Gate.as_saved` returned.

    Returns:
        `given` itself if it is a gate, otherwise a new one.

    Raises:
        InvalidArgumentError: the file cannot be read, is larger than 16 MiB, is damaged or contains
            no gate; or the dictionary does not describe one.
        InvalidTypeError: `given` is none of these.
    """
    if isinstance(given, Gate):
        return given
    if isinstance(given, str | os.PathLike):
        return _gate_in(Path(given))
    if isinstance(given, Mapping):
        with _reading("the saved gate"):
            values = {name: given[name] for name in (*_SIZES, "model")}
            return Gate(**values, data=base64.b64decode(given["data"], validate=True))
    problem = f"expected a gate or a file name, but got a value of type {type(given).__name__}"
    raise wrong("gate", problem, _REMEDY, InvalidTypeError)


def _gate_in(path: Path) -> Gate:
    """Read a gate from a file, after comparing its checksum.

    Raises:
        InvalidArgumentError: the file cannot be read, is larger than `MOST_BYTES`, is damaged or
            contains no gate.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        problem = f"the file {str(path)!r} could not be read ({error.strerror})"
        raise wrong("gate", problem, _REMEDY) from error
    with _reading(repr(str(path))):
        if len(content) > MOST_BYTES:
            raise ValueError(f"the file has more than {MOST_BYTES:,} bytes")
        metadata = _metadata(content)
        if metadata.get("format") != FORMAT:
            raise ValueError(f"expected the format {FORMAT!r}, but got {metadata.get('format')!r}")
        weights = load(content)["weights"]
        if weights.dtype != torch.float16:
            raise ValueError(f"the weights have the type {weights.dtype}")
        data = weights.contiguous().view(torch.uint8).numpy().tobytes()
        sizes = {name: int(metadata[name]) for name in _SIZES}
        gate = Gate(**sizes, model=metadata["model"], data=data)
        if gate._seal() != metadata["sha256"]:
            raise ValueError("the content of the file has changed since it was written")
        return gate


def _metadata(content: bytes) -> dict[str, str]:
    """Return the metadata in the header of a safetensors file.

    Bytes that are no such file cause one of the errors that `_reading` converts.

    Args:
        content: the bytes of the file.
    """
    size = int.from_bytes(content[:8], "little")
    found: dict[str, str] = json.loads(content[8 : 8 + size])["__metadata__"]
    return found


@contextlib.contextmanager
def _reading(place: str) -> Iterator[None]:
    """Convert all errors in this block to an error that says which gate cannot be read.

    Args:
        place: the name of what is read, for the message.

    Raises:
        InvalidArgumentError: the bytes cannot be understood. An error of this class that the block
            raises itself is not changed.
    """
    try:
        yield
    except InvalidArgumentError:
        raise
    except (
        *(AttributeError, LookupError, TypeError, ValueError, RuntimeError, RecursionError),
        *(SafetensorError, binascii.Error, OverflowError),
    ) as error:
        problem = f"{place} is not a valid gate, or it is damaged ({error!r:.80})"
        raise wrong("gate", problem, _REMEDY) from error
