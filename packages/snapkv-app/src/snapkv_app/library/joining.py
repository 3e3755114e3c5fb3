"""Join the keys and values of documents that were read separately.

A key contains its token's position as a rotation, and attention depends on distances only. So if a
document is moved to another position, its keys are rotated by the difference, and its values stay
unchanged.
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
    InvalidTypeError,
    PromptTooLongError,
    UnsupportedModelError,
    wrong,
)
from snapkv.hf.cache import CompressedCache
from snapkv.hf.model_parts import max_positions, rotations_of
from snapkv.validation import require_int

Turn = Callable[[Tensor, Tensor], Tensor]
"""Rotates keys (1, H, S, D) by a number of positions, (1, 1) int64, and returns new keys."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A document that was read by itself after a prefix, with its cache.

    Attributes:
        input_ids: (1, T) integers, the tokens of the prefix and the document.
        cache: the cache that has read exactly these tokens.
        prefix_tokens: the number of tokens of the prefix, which all parts have in common.

    Raises:
        CacheMismatchError: the cache has not read exactly T tokens, or has several rows or padding.
        InvalidArgumentError: `input_ids` is not one row with tokens after the prefix, or the cache
            has recall or has moved the keys of its sinks.
        InvalidTypeError: an argument has the wrong type.
    """

    input_ids: Tensor
    cache: CompressedCache
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        ids, cache = self.input_ids, self.cache
        if not isinstance(ids, Tensor) or ids.is_floating_point():
            raise wrong(
                "input_ids",
                f"expected a tensor of integers, but got {type(ids).__name__}",
                "Use the token ids that were read into the cache of the document",
                InvalidTypeError,
            )
        if not isinstance(cache, CompressedCache):
            raise wrong(
                "cache",
                f"expected a CompressedCache, but got {type(cache).__name__}",
                "Use a CompressedCache to read the document",
                InvalidTypeError,
            )
        require_int("prefix_tokens", self.prefix_tokens, minimum=0)
        if ids.ndim != 2 or len(ids) != 1 or ids.shape[1] <= self.prefix_tokens:
            raise wrong(
                "input_ids",
                f"expected the tokens of one document after a prefix of {self.prefix_tokens}, but "
                f"got a tensor with the shape {tuple(ids.shape)}",
                "Make a separate Part for each document, and do not use empty documents",
            )
        self._require_read()

    def _require_read(self) -> None:
        """Raise unless the cache has read exactly these tokens, in one row, at their own positions.

        Raises:
            CacheMismatchError: the cache has read a different number of tokens, or has several rows
                or padding.
            InvalidArgumentError: the cache has recall, or has moved the keys of its sinks.
        """
        layers, seen = self.cache.prompt_state.layers, self.cache.get_seq_length()
        if seen != self.tokens:
            raise wrong(
                "cache",
                f"the cache has read {seen:,} tokens, but input_ids has {self.tokens:,} tokens",
                "Use the cache only to read this document, and do not read other tokens after it",
                CacheMismatchError,
            )
        if any(len(layer.keys) != 1 or layer.slots.pads is not None for layer in layers):
            raise wrong(
                "cache",
                "expected one row without padding, but got a batch or padded tokens",
                "Read each document separately",
                CacheMismatchError,
            )
        if any(layer.offloaded.is_enabled for layer in layers):
            raise wrong(
                "cache",
                "expected all keys and values on the device, but got a cache with recall",
                "Make the cache without the argument recall to read the document",
            )
        if any(layer.state.sink_keys is not None for layer in layers):
            raise wrong(
                "cache",
                f"the method {self.cache.policy.name} has moved the keys of the attention sinks "
                "to different positions",
                "Use StreamingLLM(positions='original') or a different policy to read the document",
            )

    @property
    def tokens(self) -> int:
        """T, the number of tokens of the prefix and the document."""
        return int(self.input_ids.shape[1])


def joined_ids(parts: Sequence[Part]) -> Tensor:
    """Return the tokens of all parts, one after the other, with only one prefix.

    Returns:
        (1, N) int64, on the device of the first part, with the prefix of the first part.

    Raises:
        InvalidArgumentError: there is no part.
        InvalidTypeError: an element of `parts` is not a `Part`.
    """
    _require_some(parts)
    device = parts[0].input_ids.device
    pieces = [part.input_ids[:, part.prefix_tokens :].to(device) for part in parts[1:]]
    return torch.cat([parts[0].input_ids, *pieces], dim=1).long()


def require_joinable(model: PreTrainedModel, parts: Sequence[Part]) -> None:
    """Raise unless the parts can be joined in one cache of `model`.

    Raises:
        CacheMismatchError: a part belongs to another model, or has another prefix than the first.
        InvalidArgumentError: there is no part, or a part stores other tokens for every query head.
        InvalidTypeError: an element of `parts` is not a `Part`.
        PromptTooLongError: together the parts have more tokens than the model has positions.
        UnsupportedModelError: some layers of the model do not have full attention.
    """
    _require_some(parts)
    prefix = parts[0].input_ids[:, : parts[0].prefix_tokens].cpu()
    for number, part in enumerate(parts):
        if part.cache.model is not model:
            raise wrong(
                "parts",
                f"{_named(model)} cannot join part {number}, because the cache of this part "
                f"belongs to {_named(part.cache.model)}",
                "Load the cache for this model",
                CacheMismatchError,
            )
        if not torch.equal(part.input_ids[:, : part.prefix_tokens].cpu(), prefix):
            raise wrong(
                "parts",
                f"part {number} does not begin with the prefix of {prefix.shape[1]} tokens of the "
                "first part",
                "Read the document again after this prefix",
                CacheMismatchError,
            )
        if any(
            each.keys.shape[1] != each.store.num_kv_heads for each in part.cache.prompt_state.layers
        ):
            raise wrong(
                "parts",
                f"{part.cache.policy.name} has kept tokens per query head in part {number}, but "
                "only tokens that are kept per KV head can be joined",
                "Use a different value than 'none' for group_reduce to read the document",
            )
    cache = parts[0].cache
    if cache.is_hybrid:
        raise wrong(
            "model",
            f"documents cannot be joined for {type(model).__name__}, because some of its layers "
            "do not have full attention",
            "Read the documents together as one prompt",
            UnsupportedModelError,
        )
    tokens, positions = int(joined_ids(parts).shape[1]), max_positions(model)
    if positions is not None and tokens > positions:
        raise wrong(
            "parts",
            f"the documents have {tokens:,} tokens together, which is more than the {positions:,} "
            f"positions of {type(model).__name__}",
            "Join fewer documents",
            PromptTooLongError,
        )


def _require_some(parts: Sequence[Part]) -> None:
    """Raise unless `parts` contains at least one `Part` and nothing else.

    Raises:
        InvalidArgumentError: `parts` is empty.
        InvalidTypeError: an element is not a `Part`.
    """
    if not parts:
        raise wrong(
            "parts",
            "expected at least one document, but got none",
            "Pass a list of Part objects",
        )
    for part in parts:
        if not isinstance(part, Part):
            raise wrong(
                "parts",
                "expected a list of Part objects, but got an element of type "
                f"{type(part).__name__}",
                "Make a separate Part for each document",
                InvalidTypeError,
            )


def _named(model: PreTrainedModel) -> str:
    """Return the class and the path of a model, for an error message."""
    path = getattr(model.config, "name_or_path", "")
    return f"{type(model).__name__} {path!r}" if path else f"a {type(model).__name__}"


@dataclass(frozen=True, kw_only=True)
class JoinedLayer:
    """The stored keys and values of all N joined tokens in one layer.

    There are H KV heads, and each has S slots for a token.

    Attributes:
        key_states: (1, H, S, D), rotated to the tokens' positions in the joined text.
        value_states: (1, H, S, Dv).
        places: (1, H, S) int64, the token in every slot, ascending in every head; -1 in the leading
            slots of a head that stores fewer than S tokens.
        tokens: N.
    """

    key_states: Tensor
    value_states: Tensor
    places: Tensor
    tokens: int

    @property
    def slots(self) -> int:
        """S, the number of slots of each head: the tokens of the head that stores the most."""
        return int(self.places.shape[-1])

    @functools.cached_property
    def is_even(self) -> bool:
        """Whether all heads of the layer store the same number of tokens."""
        return bool((self.places >= 0).all())

    @property
    def is_whole(self) -> bool:
        """Whether all heads of the layer store all N tokens."""
        return self.slots == self.tokens and self.is_even

    def slots_of(self, chosen: Tensor) -> Tensor:
        """Return the slot in which each head stores each of the chosen tokens.

        Args:
            chosen: (n,) int64, positions of tokens in the joined text.

        Returns:
            (H, n) int64; -1 if a head does not store the token.
        """
        H, S = self.places.shape[1:]
        found = self.places.new_full((H, self.tokens + 1), -1)  # the last column is for no token
        slots = torch.arange(S, device=found.device).expand(H, -1)
        found.scatter_(1, self.places[0] % (self.tokens + 1), slots)
        found[:, -1] = -1
        return found[:, chosen]

    def put(self, chosen: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Replace the keys and values of tokens in the heads that store them.

        Changes `key_states` and `value_states` in place. A head that does not store a token stays
        as it is.

        Args:
            chosen: (n,) int64, positions of tokens in the joined text.
            keys: (1, H, n, D), their new keys.
            values: (1, H, n, Dv), their new values.

        Returns:
            (n,) float32, the squared distance between the old and the new states of each token,
            summed over keys, values and the heads that store the token.
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
    """Join the stored keys and values of all parts in every layer, with only one prefix.

    The keys are rotated to the positions that the tokens have in the joined text. The parts are not
    changed; the caller must have checked them with `require_joinable`.

    Returns:
        One joined layer for each layer of the model, with tensors of its own.

    Raises:
        UnsupportedModelError: the keys of the model cannot be rotated to other positions.
    """
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
    """Return the keys, values and positions of a part in one layer, moved to new positions.

    Args:
        layer: the layer of the part.
        rotation: rotates keys by a number of positions.
        prefix_tokens: the number of leading tokens to leave out; 0 for the first part.
        step: the number of positions by which the part is moved; may be negative.

    Returns:
        Keys (1, H, S, D), values (1, H, S, Dv) and positions (1, H, S). Slots of the prefix are
        only cut off as far as all heads have them; in the others, and in empty slots, the position
        is -1.
    """
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
    """Build a joined layer, in which the empty slots of every head come before its tokens.

    As many slots remain as the head with the most tokens needs.

    Args:
        keys: (1, H, S, D).
        values: (1, H, S, Dv).
        places: (1, H, S) int64, the token in every slot; -1 in empty slots.
        tokens: N, the number of joined tokens.
    """
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
