"""How a cache goes on from what documents hold: all of it, a part, or heads of their own length."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from snapkv.cache.layer import CompressedLayer
from snapkv.cache.slots import SlotMap
from snapkv.errors import InvalidArgumentError
from snapkv.hf.cache import CompressedCache
from snapkv.kvzip import require_one_reading
from snapkv.library.joining import JoinedLayer
from snapkv.policies import EvictingPolicy, FullCache, Policy
from snapkv.policies.base import ALL_QUERIES
from snapkv.storage.dense import DenseStore
from snapkv.storage.ragged import RaggedStore

_WHOLE = "keep the documents whole (FullCache)"


class Held(ABC):
    """What a kind of joined documents allows, and how it becomes a cache."""

    @abstractmethod
    def require(self, cache: CompressedCache) -> None:
        """Raise unless the policy and the options of a new cache go with it.

        Raises:
            InvalidArgumentError: they do not.
        """

    def fill(self, cache: CompressedCache, joined: Sequence[JoinedLayer]) -> None:
        """Let a new cache have seen the documents."""
        for layer, states in zip(cache.reading.layers, joined, strict=True):
            self._fill(layer, states)

    @abstractmethod
    def _fill(self, layer: CompressedLayer, joined: JoinedLayer) -> None: ...


class Whole(Held):
    """Nothing was dropped: the cache is as in the middle of a prompt."""

    def require(self, cache: CompressedCache) -> None:
        """Refuse policies that want more of the documents than keys and values."""
        require_choice_behind(cache.policy)
        if cache.policy.query_tokens == ALL_QUERIES:
            raise InvalidArgumentError(
                f"policy: expected one whose last queries vote, since the documents' queries are "
                f"not held, got {cache.policy.name}, which asks all of a prompt's; use SnapKV, or "
                "recompute=1"
            )

    def _fill(self, layer: CompressedLayer, joined: JoinedLayer) -> None:
        layer.restore(DenseStore.kind, _state(joined), SlotMap())


class Even(Whole):
    """Every head holds as many tokens: as in the middle of a prompt that is held to a cap."""

    def require(self, cache: CompressedCache) -> None:
        """Refuse policies that cannot rate a part, and options that need what was dropped."""
        super().require(cache)
        _refuse_options(cache, "protect", "fair", "recall")
        if isinstance(cache.policy, FullCache):
            return
        try:
            cache.policy.require_cap(sys.maxsize)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                f"policy: expected a method with a budget that can rate a part of what was read, "
                f"such as SnapKV(budget=1024), where documents were compressed, got "
                f"{cache.policy!r}; use one of them, or {_WHOLE}"
            ) from error

    def _fill(self, layer: CompressedLayer, joined: JoinedLayer) -> None:
        slots = SlotMap().chosen(joined.places, joined.tokens, is_partial=True)
        layer.restore(DenseStore.kind, _state(joined), slots)


class Uneven(Held):
    """Heads, or layers, hold different numbers of tokens: as behind a compressed prompt."""

    def require(self, cache: CompressedCache) -> None:
        """Refuse policies that evict, and options that choose again or store otherwise."""
        options = ("protect", "fair", "recall", "quantize", "turns", "storage")
        _refuse_options(cache, *options)
        if isinstance(cache.policy, EvictingPolicy):
            raise InvalidArgumentError(
                f"policy: expected one that only compresses prompts where heads hold different "
                f"numbers of tokens, got {cache.policy.name}, which evicts after every token; use "
                f"SnapKV, or {_WHOLE}"
            )

    def fill(self, cache: CompressedCache, joined: Sequence[JoinedLayer]) -> None:
        """The prompt has ended: the question is read over what is held."""
        super().fill(cache, joined)
        cache.reading.prompt_end = joined[0].tokens

    def _fill(self, layer: CompressedLayer, joined: JoinedLayer) -> None:
        slots = torch.arange(joined.slots, device=joined.places.device)
        slots = slots.expand_as(joined.places).masked_fill(joined.places < 0, -1)
        store = RaggedStore.gather(DenseStore().fill(**_state(joined)), slots, joined.slots)
        columns = SlotMap().chosen(joined.places, joined.tokens, chosen_at=joined.tokens)
        layer.restore(RaggedStore.kind, store.state(), columns)


def held_of(joined: Sequence[JoinedLayer]) -> Held:
    """What kind it is; by all layers, since they share the masks of a prompt that goes on."""
    if all(layer.is_whole for layer in joined):
        return Whole()
    alike = all(layer.is_even for layer in joined) and len({layer.slots for layer in joined}) == 1
    return Even() if alike else Uneven()


def require_choice_behind(policy: Policy) -> None:
    """Raise where a policy cannot choose when a question has been read behind the documents.

    Raises:
        InvalidArgumentError: it has the text read twice, before any question is known.
    """
    require_one_reading(policy, "compress the documents by it, and pass SnapKV for the question")


def _state(joined: JoinedLayer) -> dict[str, Any]:
    keys, values = joined.key_states, joined.value_states
    return {"keys": keys, "values": values, "num_kv_heads": keys.shape[1]}


def _refuse_options(cache: CompressedCache, *names: str) -> None:
    usual = {"storage": "dynamic", "turns": "append"}
    for name in names:
        given = cache.options[name]
        if given is not None and given != usual.get(name):
            raise InvalidArgumentError(
                f"{name}: expected {usual.get(name, 'none')!r} where documents were compressed to "
                f"numbers of tokens that cannot be chosen from again, got {given!r}; leave it out, "
                f"or {_WHOLE}"
            )
