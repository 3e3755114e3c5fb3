"""A gate: numbers that tell from a token's own key, value and place how much it will be wanted.

One for each KV head, fitted to a model by `snapkv study fit-gate`. A file of one is safetensors,
without code, and says of which model it is.
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

from snapkv.errors import InvalidArgumentError, InvalidTypeError
from snapkv.policies.states import PromptLayer

FORMAT = "snapkv gate 1"
MOST_BYTES = 1 << 24
"""Of a file; the largest models need two million."""

_REMEDY = "fit one with snapkv study fit-gate"
_LEAST_NORM = 1e-6
_AT_ONCE = 4096
_SIZES = ("layers", "heads", "key_size", "value_size")


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Weights of a linear map per layer and KV head, from `features` to log-scores.

    Attributes:
        layers: those of full attention.
        heads: KV heads of each.
        key_size, value_size: of a head.
        model: what tells the model from others, see `snapkv.hf.identity.digest_of`; "" for any.
        data: (layers, heads, features) float16, little-endian: a weight for each of `features`.

    Raises:
        InvalidArgumentError: `data` of another size, or numbers that are not finite.
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
            raise InvalidArgumentError(
                f"gate: expected {expected:,} bytes of weights for {self.layers} layers x "
                f"{self.heads} KV heads, got {len(self.data):,}; {_REMEDY}"
            )
        if not self.weights.isfinite().all():
            raise InvalidArgumentError(f"gate: expected finite weights, got others; {_REMEDY}")

    @classmethod
    def of(cls, weights: Tensor, key_size: int, value_size: int, model: str = "") -> Self:
        """A gate of (layers, heads, features) weights of any dtype."""
        layers, heads, _ = weights.shape
        data = weights.detach().cpu().to(torch.float16).contiguous().view(torch.uint8)
        sizes = {"layers": layers, "heads": heads, "key_size": key_size, "value_size": value_size}
        return cls(**sizes, model=model, data=data.numpy().tobytes())

    @functools.cached_property
    def weights(self) -> Tensor:
        """(layers, heads, features) float32."""
        flat = torch.frombuffer(bytearray(self.data), dtype=torch.float16)
        return flat.float().view(self.layers, self.heads, -1)

    @property
    def digest(self) -> str:
        """What tells the weights from others."""
        return hashlib.sha256(self.data).hexdigest()

    def log_scores(self, layer: PromptLayer) -> Tensor:
        """Of every token of a layer: (B, heads, T) float32, higher first; of pads anything."""
        self._require_shapes(layer)
        weights = self.weights[layer.depth, :, :, None].to(layer.keys.device)
        parts = [features(layer, part) @ weights for part in _pieces(layer.keys.shape[2])]
        return torch.cat(parts, dim=2)[..., 0]

    def _require_shapes(self, layer: PromptLayer) -> None:
        """Raise unless the layer is of a model of such layers and heads."""
        own = (self.layers, self.heads, self.key_size, self.value_size)
        got = (layer.num_layers, *layer.keys.shape[1::2], layer.values.shape[3])
        if own != got:
            raise InvalidArgumentError(
                f"gate: expected one of {got} layers, KV heads, sizes of keys and of values, got "
                f"{own}; pass the one of this model, or {_REMEDY}"
            )

    def describe(self) -> str:
        """The beginning of the digest."""
        return self.digest[:16]

    def as_saved(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        sizes = {name: getattr(self, name) for name in _SIZES}
        return sizes | {"model": self.model, "data": base64.b64encode(self.data).decode()}

    def as_file(self) -> bytes:
        """All of it, as a file has it."""
        flat = torch.frombuffer(bytearray(self.data), dtype=torch.float16)
        told = {name: str(getattr(self, name)) for name in _SIZES}
        told |= {"format": FORMAT, "model": self.model, "sha256": self._seal()}
        return save({"weights": flat.view(self.layers, self.heads, -1)}, told)

    def _seal(self) -> str:
        """The digest of all that a file says."""
        told = repr([getattr(self, name) for name in (*_SIZES, "model")])
        return hashlib.sha256(told.encode() + self.data).hexdigest()


def feature_count(key_size: int, value_size: int) -> int:
    """How many numbers a gate looks at."""
    return 2 * key_size + value_size + 6


def features(layer: PromptLayer, part: slice) -> Tensor:
    """What a gate looks at of some slots: (B, Hkv, slots, features) float32.

    The key as it was before rotary embedding, its squares, the value, the logarithms of both
    norms; of the N tokens of its row the token is number i, from 0: log(i + 1), i / N and
    log(N - i); and 1.
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
    """So few at once that what is looked at takes little memory."""
    return [slice(at, min(at + _AT_ONCE, slots)) for at in range(0, slots, _AT_ONCE)]


def read_gate(given: object) -> Gate:
    """A gate as a user has given it, itself or the name of a file, or as `as_saved` has it.

    Raises:
        InvalidArgumentError: no such file, a larger one than 16 MiB, or one of something else.
        InvalidTypeError: neither of them.
    """
    if isinstance(given, Gate):
        return given
    if isinstance(given, str | os.PathLike):
        return _gate_in(Path(given))
    if isinstance(given, Mapping):
        with _reading("what was saved"):
            values = {name: given[name] for name in (*_SIZES, "model")}
            return Gate(**values, data=base64.b64decode(given["data"], validate=True))
    raise InvalidTypeError(
        f"gate: expected the name of a file, got {given!r} of type {type(given).__name__}; "
        f"{_REMEDY}"
    )


def _gate_in(path: Path) -> Gate:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InvalidArgumentError(
            f"gate: expected a file that snapkv study fit-gate has written, got {str(path)!r}, "
            f"which cannot be read ({error.strerror}); {_REMEDY}"
        ) from error
    with _reading(repr(str(path))):
        if len(content) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        told = _metadata(content)
        if told.get("format") != FORMAT:
            raise ValueError(f"its format is {told.get('format')!r}, not {FORMAT!r}")
        weights = load(content)["weights"]
        if weights.dtype != torch.float16:
            raise ValueError(f"its weights are {weights.dtype}")
        data = weights.contiguous().view(torch.uint8).numpy().tobytes()
        gate = Gate(**{name: int(told[name]) for name in _SIZES}, model=told["model"], data=data)
        if gate._seal() != told["sha256"]:
            raise ValueError("its bytes are not those that were written")
        return gate


def _metadata(content: bytes) -> dict[str, str]:
    """What stands in the header of a safetensors file beside its tensors."""
    size = int.from_bytes(content[:8], "little")
    found: dict[str, str] = json.loads(content[8 : 8 + size])["__metadata__"]
    return found


@contextlib.contextmanager
def _reading(place: str) -> Iterator[None]:
    """Turn whatever is wrong with a gate into one line that says where it was."""
    try:
        yield
    except InvalidArgumentError:
        raise
    except (
        *(AttributeError, LookupError, TypeError, ValueError, RuntimeError, RecursionError),
        *(SafetensorError, binascii.Error, OverflowError),
    ) as error:
        raise InvalidArgumentError(
            f"gate: expected what snapkv study fit-gate has written, whole and unchanged, got "
            f"something else in {place} ({error!r:.80}); {_REMEDY}"
        ) from error
