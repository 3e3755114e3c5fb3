"""Documents that were read apart, and what a cache's layers hold of them when they are joined.

A key knows its token's place by a rotation, and only distances matter to attention. So a document
that begins at another place than it was read at has its keys turned by the difference; its values
stay as they are.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.cache.layer import CompressedLayer
from snapkv.errors import (
    CacheMismatchError,
    InvalidArgumentError,
    InvalidTypeError,
    PromptTooLongError,
    UnsupportedModelError,
)
from snapkv.hf.cache import CompressedCache
from snapkv.hf.model_parts import max_positions, rotations_of
from snapkv.validation import require_int

Turn = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One document, read by itself after a prefix.

    Attributes:
        input_ids: (1, T) integers, the prefix and the document.
        cache: what has read them, and nothing else.
        prefix_tokens: P, how many of the first tokens are the prefix, which all parts share.

    Raises:
        CacheMismatchError: the cache has seen other than T tokens, or padded ones.
        InvalidArgumentError: not the tokens of one document, or none after the prefix; a cache
            whose tokens lie off the device, or whose sinks were moved.
        InvalidTypeError: a value of the wrong type.
    """

    input_ids: Tensor
    cache: CompressedCache
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        ids, cache = self.input_ids, self.cache
        if not isinstance(ids, Tensor) or ids.is_floating_point():
            raise InvalidTypeError(
                f"input_ids: expected a tensor of integers, got {type(ids).__name__}; pass the ids "
                "that the document's cache has read"
            )
        if not isinstance(cache, CompressedCache):
            raise InvalidTypeError(
                f"cache: expected a CompressedCache, got {type(cache).__name__}; read the document "
                "with one"
            )
        require_int("prefix_tokens", self.prefix_tokens, minimum=0)
        if ids.ndim != 2 or len(ids) != 1 or ids.shape[1] <= self.prefix_tokens:
            raise InvalidArgumentError(
                f"input_ids: expected the tokens of one document after a prefix of "
                f"{self.prefix_tokens}, got shape {tuple(ids.shape)}; make a Part of each document "
                "that is not empty"
            )
        self._require_read()

    def _require_read(self) -> None:
        """Refuse a cache that has not read these tokens and holds them at their places."""
        layers, seen = self.cache.prompt_state.layers, self.cache.get_seq_length()
        if seen != self.tokens:
            raise CacheMismatchError(
                f"cache: expected one that has seen the {self.tokens:,} tokens of input_ids, got "
                f"{seen:,} seen; read the document, and nothing after it"
            )
        if any(len(layer.keys) != 1 or layer.slots.pads is not None for layer in layers):
            raise CacheMismatchError(
                "cache: expected one row without padding, got a batch or pads; read every document "
                "by itself"
            )
        if any(layer.offloaded.is_enabled for layer in layers):
            raise InvalidArgumentError(
                "cache: expected keys and values on the device, got a cache with recall; read the "
                "document without recall"
            )
        if any(layer.state.sink_keys is not None for layer in layers):
            raise InvalidArgumentError(
                f"cache: expected keys at their tokens' own positions, got those of "
                f"{self.cache.policy.name}, whose sinks were moved; read the document with "
                "StreamingLLM(positions='original') or another policy"
            )

    @property
    def tokens(self) -> int:
        """T."""
        return int(self.input_ids.shape[1])


def joined_ids(parts: Sequence[Part]) -> Tensor:
    """(1, N) int64: the prefix once, and the documents in their order.

    Raises:
        InvalidArgumentError: no part.
    """
    _require_some(parts)
    device = parts[0].input_ids.device
    pieces = [part.input_ids[:, part.prefix_tokens :].to(device) for part in parts[1:]]
    return torch.cat([parts[0].input_ids, *pieces], dim=1).long()


def require_joinable(model: PreTrainedModel, parts: Sequence[Part]) -> None:
    """Refuse parts that cannot stand one after the other in a cache of this model."""
    _require_some(parts)
    prefix = parts[0].input_ids[:, : parts[0].prefix_tokens].cpu()
    for number, part in enumerate(parts):
        if part.cache.model is not model:
            raise CacheMismatchError(
                f"parts: expected caches of the model that joins them, {_named(model)}, got one of "
                f"{_named(part.cache.model)} in part {number}; load its cache for this model"
            )
        if not torch.equal(part.input_ids[:, : part.prefix_tokens].cpu(), prefix):
            raise CacheMismatchError(
                f"parts: expected documents that were read after the same prefix of "
                f"{prefix.shape[1]} tokens, got another one in part {number}; read it again after "
                "that prefix"
            )
        if any(
            each.keys.shape[1] != each.store.num_kv_heads for each in part.cache.prompt_state.layers
        ):
            raise InvalidArgumentError(
                f"parts: expected one set of tokens per KV head, got one per query head in part "
                f"{number}, of {part.cache.policy.name}; read it with another group_reduce than "
                "'none'"
            )
    cache = parts[0].cache
    if cache.is_hybrid:
        raise UnsupportedModelError(
            f"model: expected full attention in every layer where documents are joined, got "
            f"{type(model).__name__}, some of whose layers keep the last tokens only, or none; "
            "read its documents together"
        )
    tokens, positions = int(joined_ids(parts).shape[1]), max_positions(model)
    if positions is not None and tokens > positions:
        raise PromptTooLongError(
            f"parts: expected at most {positions:,} tokens together, the positions that "
            f"{type(model).__name__} has, got {tokens:,}; join fewer documents"
        )


def _require_some(parts: Sequence[Part]) -> None:
    if not parts:
        raise InvalidArgumentError(
            "parts: expected at least one document, got none; pass [Part(...)]"
        )
    for part in parts:
        if not isinstance(part, Part):
            raise InvalidTypeError(
                f"parts: expected documents as snapkv_app.library.Part, got {type(part).__name__}; "
                "pass [Part(input_ids=..., cache=...)]"
            )


def _named(model: PreTrainedModel) -> str:
    path = getattr(model.config, "name_or_path", "")
    return f"{type(model).__name__} {path!r}" if path else f"a {type(model).__name__}"


@dataclass(frozen=True, kw_only=True)
class JoinedLayer:
    """What one layer holds of all N tokens.

    Attributes:
        key_states: (1, H, S, D), turned to where their tokens are now.
        value_states: (1, H, S, Dv).
        places: (1, H, S) int64, which token every slot holds, ascending in every head; -1 in the
            leading slots of a head that holds fewer than S.
        tokens: N.
    """

    key_states: Tensor
    value_states: Tensor
    places: Tensor
    tokens: int

    @property
    def slots(self) -> int:
        """S, the tokens of the head that holds most."""
        return int(self.places.shape[-1])

    @functools.cached_property
    def is_even(self) -> bool:
        """Whether every head holds as many tokens as the others."""
        return bool((self.places >= 0).all())

    @property
    def is_whole(self) -> bool:
        """Whether every head holds all tokens."""
        return self.slots == self.tokens and self.is_even

    def slots_of(self, chosen: Tensor) -> Tensor:
        """(H, n) int64: in which slot every head holds (n,) tokens; -1 where it holds none."""
        H, S = self.places.shape[1:]
        found = self.places.new_full((H, self.tokens + 1), -1)  # the last column is for no token
        slots = torch.arange(S, device=found.device).expand(H, -1)
        found.scatter_(1, self.places[0] % (self.tokens + 1), slots)
        found[:, -1] = -1
        return found[:, chosen]

    def put(self, chosen: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Hold other states of (n,) tokens, (1, H, n, D), in heads that hold them; in place.

        Returns:
            (n,) float32: how far apart the old and the new states of a token lie. Squared
            distances, summed over keys, values and the heads that hold it.
        """
        slots = self.slots_of(chosen)
        heads, tokens = (slots >= 0).nonzero(as_tuple=True)
        where = (torch.zeros_like(heads), heads, slots[heads, tokens])
        apart = torch.zeros(len(chosen), dtype=torch.float32, device=keys.device)
        for held, new in ((self.key_states, keys), (self.value_states, values)):
            own = new[0, heads, tokens]
            distances = (held[where].float() - own.float()).square().sum(dim=-1)
            apart.index_add_(0, tokens, distances)
            held.index_put_(where, own)
        return apart


def join(model: PreTrainedModel, parts: Sequence[Part]) -> list[JoinedLayer]:
    """What every layer holds of the parts, the prefix once; refused where keys cannot be turned."""
    layers = range(len(parts[0].cache.layers))
    rotations = rotations_of(model, layers, "Read the documents in full with recompute=1")
    steps, end = [], parts[0].prefix_tokens
    for part in parts:
        steps.append(end - part.prefix_tokens)
        end += part.tokens - part.prefix_tokens
    joined = []
    for index in layers:
        held = [
            _moved(
                part.cache.prompt_state.layers[index],
                rotations[index],
                prefix_tokens=part.prefix_tokens if number else 0,
                step=step,
            )
            for number, (part, step) in enumerate(zip(parts, steps, strict=True))
        ]
        keys, values, places = (torch.cat(states, dim=2) for states in zip(*held, strict=True))
        joined.append(_packed(keys, values, places, end))
    return joined


def _moved(
    layer: CompressedLayer, rotation: Turn, *, prefix_tokens: int, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A part's keys, values and places, without its first tokens, moved on by `step` positions."""
    keys, values = layer.store.padded()
    places = layer.stored_positions()
    left_out = int((places < prefix_tokens).sum(dim=-1).min())
    keys, values, places = (
        states[:, :, left_out:].to(keys.device) for states in (keys, values, places)
    )
    if step:
        steps = torch.full((1, 1), step, dtype=torch.int64, device=keys.device)
        keys = rotation(keys, steps).to(keys.dtype)
    return keys, values, (places + step).masked_fill(places < prefix_tokens, -1)


def _packed(keys: Tensor, values: Tensor, places: Tensor, tokens: int) -> JoinedLayer:
    """Slots that hold no token stand in front of every head, as few as there must be."""
    held = places >= 0
    if not bool(held.all()):
        longest = int(held.sum(dim=-1).max())
        order = held.byte().argsort(dim=-1, stable=True)[..., places.shape[-1] - longest :]
        keys, values = (
            states.gather(2, order[..., None].expand(-1, -1, -1, states.shape[-1]))
            for states in (keys, values)
        )
        places = places.gather(2, order)
    return JoinedLayer(key_states=keys, value_states=values, places=places, tokens=tokens)
