"""Documents that were read apart: their tokens and caches, and where they stand when joined."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.errors import (
    CacheMismatchError,
    InvalidArgumentError,
    InvalidTypeError,
    PromptTooLongError,
    UnsupportedModelError,
)
from snapkv.hf.cache import CompressedCache
from snapkv.plan import max_positions
from snapkv.validation import require_int


@dataclass(frozen=True, kw_only=True)
class Part:
    """One document, read by itself behind a prefix.

    Attributes:
        input_ids: (1, T) integers, the prefix and the document.
        cache: what has read them, and nothing else.
        prefix_tokens: P, how many of the first tokens are the prefix, which all parts share.

    Raises:
        CacheMismatchError: the cache has seen other than T tokens, or padded ones.
        InvalidArgumentError: not the tokens of one document, or none behind the prefix; a cache
            whose tokens lie off the device, or whose sinks were moved.
        InvalidTypeError: a value of the wrong type.
    """

    input_ids: Tensor
    cache: CompressedCache
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        """Check that these belong together."""
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
                f"input_ids: expected the tokens of one document behind a prefix of "
                f"{self.prefix_tokens}, got shape {tuple(ids.shape)}; make a Part of each document "
                "that is not empty"
            )
        self._require_read()

    def _require_read(self) -> None:
        """Refuse a cache that has not read these tokens and holds them at their places."""
        layers, seen = self.cache.reading.layers, self.cache.get_seq_length()
        if seen != self.tokens:
            raise CacheMismatchError(
                f"cache: expected one that has seen the {self.tokens:,} tokens of input_ids, got "
                f"{seen:,} seen; read the document, and nothing behind it"
            )
        if any(len(layer.keys) != 1 or layer.slots.pads is not None for layer in layers):
            raise CacheMismatchError(
                "cache: expected one row without padding, got a batch or pads; read every document "
                "by itself"
            )
        if any(layer.offloaded is not None for layer in layers):
            raise InvalidArgumentError(
                "cache: expected keys and values on the device, got a cache with recall; read the "
                "document without recall"
            )
        if any(layer.notes.sink_keys is not None for layer in layers):
            raise InvalidArgumentError(
                f"cache: expected keys at their tokens' own positions, got those of "
                f"{self.cache.policy.name}, whose sinks were moved; read the document with "
                "StreamingLLM(positions='original') or another policy"
            )

    @property
    def tokens(self) -> int:
        """T."""
        return int(self.input_ids.shape[1])

    @property
    def document_tokens(self) -> int:
        """T - P."""
        return self.tokens - self.prefix_tokens


def joined_ids(parts: Sequence[Part]) -> Tensor:
    """(1, N) int64: the prefix once, and the documents in their order.

    Raises:
        InvalidArgumentError: no part.
    """
    _require_some(parts)
    device = parts[0].input_ids.device
    pieces = [part.input_ids[:, part.prefix_tokens :].to(device) for part in parts[1:]]
    return torch.cat([parts[0].input_ids, *pieces], dim=1).long()


def steps_of(parts: Sequence[Part]) -> list[int]:
    """By how many positions every part's document moves on when the parts are joined."""
    steps, end = [], parts[0].prefix_tokens
    for part in parts:
        steps.append(end - part.prefix_tokens)
        end += part.document_tokens
    return steps


def require_joinable(model: PreTrainedModel, parts: Sequence[Part]) -> None:
    """Refuse parts that cannot stand one behind the other in a cache of this model.

    Raises:
        CacheMismatchError: a part of another model, or with a prefix of its own.
        InvalidArgumentError: no part, or one that keeps a set of tokens per query head.
        InvalidTypeError: something else than a part.
        PromptTooLongError: together they have more tokens than the model has positions.
        UnsupportedModelError: some of the model's layers are not compressed.
    """
    _require_some(parts)
    prefix = parts[0].input_ids[:, : parts[0].prefix_tokens].cpu()
    for number, part in enumerate(parts):
        _require_same_model(model, part, number)
        if not torch.equal(part.input_ids[:, : part.prefix_tokens].cpu(), prefix):
            raise CacheMismatchError(
                f"parts: expected documents that were read behind the same prefix of "
                f"{prefix.shape[1]} tokens, got another one in part {number}; read it again behind "
                "that prefix"
            )
        _require_own_heads(part, number)
    cache = parts[0].cache
    if len(cache.compressed_layers) < len(cache.layers):
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
                f"parts: expected documents as snapkv.library.Part, got {type(part).__name__}; "
                "pass [Part(input_ids=..., cache=...)]"
            )


def _require_same_model(model: PreTrainedModel, part: Part, number: int) -> None:
    if part.cache.model is not model:
        raise CacheMismatchError(
            f"parts: expected caches of the model that joins them, {_named(model)}, got one of "
            f"{_named(part.cache.model)} in part {number}; load its cache for this model"
        )


def _named(model: PreTrainedModel) -> str:
    path = getattr(model.config, "name_or_path", "")
    return f"{type(model).__name__} {path!r}" if path else f"a {type(model).__name__}"


def _require_own_heads(part: Part, number: int) -> None:
    if any(layer.keys.shape[1] != layer.store.num_kv_heads for layer in part.cache.reading.layers):
        raise InvalidArgumentError(
            f"parts: expected one set of tokens per KV head, got one per query head in part "
            f"{number}, of {part.cache.policy.name}; read it with another group_reduce than 'none'"
        )
