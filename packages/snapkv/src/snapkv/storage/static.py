"""Static storage: what a prompt leaves lies in buffers with room for all that is to come.

They stay where they are, so that a decoding step can be captured as a CUDA graph, or compiled, and
be replayed for every later token.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from snapkv.errors import InvalidArgumentError
from snapkv.storage.base import TokenStore
from snapkv.storage.buffers import Buffers
from snapkv.storage.dense import DenseStore
from snapkv.storage.storage import Storage
from snapkv.storage.tail import Pair, Tail


class FixedTail(Tail):
    """In buffers with room, all of which attention is handed; how many are written is a tensor.

    A step counts it up by itself. The model's mask hides what is not written, or attention to what
    heads hold does.

    Args:
        buffers: where.
        slots: tokens that there is room for.
        keys: (B, H, S, D), what to hold.
        values: (B, H, S, Dv).
    """

    count: Tensor

    def __init__(self, buffers: Buffers, slots: int, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.buffers, self.slots = buffers, slots
        self.hold(keys, values)

    @property
    def tokens(self) -> int:
        return int(self.count)

    @property
    def written(self) -> Pair:
        tokens = self.tokens
        return self.keys[:, :, :tokens], self.values[:, :, :tokens]

    def append(self, keys: Tensor, values: Tensor) -> Pair:
        new_tokens = keys.shape[2]
        places = torch.arange(new_tokens, device=keys.device) + self.count
        self.count.add_(new_tokens)
        self.keys.index_copy_(2, places, keys)
        self.values.index_copy_(2, places, values)
        return self.keys, self.values

    def hold(self, keys: Tensor, values: Tensor) -> None:
        tokens = keys.shape[2]
        if tokens > self.slots:
            raise room_refusal(tokens, self.slots)
        self.buffers.begin(len(keys))
        self.keys = self.buffers.hold("keys", keys, self.slots, axis=2)
        self.values = self.buffers.hold("values", values, self.slots, axis=2)
        self.count = self.buffers.hold("count", torch.tensor(tokens, device=keys.device))

    def crop(self, tokens: int) -> None:
        self.count.sub_(tokens)

    def columns(self, new_tokens: int) -> int:
        """All slots, written or not."""
        del new_tokens
        return self.slots

    def settled(self, heads: Any) -> Any:
        return heads.settled(self.buffers)


class LentTail(FixedTail):
    """Room for the tokens of one `generate`, behind heads that stay where they are.

    Attributes:
        stood_for_all: whether heads held nothing and the tail all tokens, before it had room.
    """

    def __init__(self, slots: int, keys: Tensor, values: Tensor, *, stood_for_all: bool) -> None:
        super().__init__(Buffers(), slots, keys, values)
        self.stood_for_all = stood_for_all

    def settled(self, heads: Any) -> Any:
        return heads


@dataclass(frozen=True, kw_only=True)
class Static(Storage):
    """Storage in buffers that are made for the first prompt and used again for every other one.

    Until a prompt ends it grows as any other does; then what is kept of it moves in.

    Attributes:
        room_tokens: tokens that there is room for behind a prompt.
        most_tokens: of a prompt that every head and layer keeps at most, all as many, so that one
            mask of the model's own does for all; None where they differ, or attention goes by head.
    """

    is_compileable: ClassVar[bool] = True

    room_tokens: int
    most_tokens: int | None = None
    _buffers: Buffers = field(default_factory=Buffers, init=False)

    @property
    def attends_by_head(self) -> bool:
        return self.codes is not None or self.most_tokens is None

    def finalize(self, store: TokenStore, kept_tokens: int, empty: Tensor | None) -> TokenStore:
        """What is stored, in the buffers.

        Raises:
            InvalidArgumentError: it has more tokens than there are slots.
        """
        store = super().finalize(store, kept_tokens, empty)
        if isinstance(store, DenseStore) and self.most_tokens is None:
            store = store.ragged_from(empty, kept_tokens)
        return self._moved_in(store)

    def restored(self, kind: str, state: dict[str, Any], empty: Tensor | None) -> TokenStore:
        store = super().restored("dense" if kind == "static" else kind, state, empty)
        return store if kind == "dense" else self._moved_in(store)  # a prompt that has not ended

    def _moved_in(self, store: TokenStore) -> TokenStore:
        slots = self.room_tokens
        if store.ragged is None:
            assert self.most_tokens is not None
            slots += self.most_tokens
        store.move_into(FixedTail(self._buffers, slots, *store.tail.written))
        return store


def room_refusal(stored_tokens: int, slots: int) -> InvalidArgumentError:
    """Of more tokens than a buffer has slots."""
    return InvalidArgumentError(
        f"room_tokens: expected room for {stored_tokens:,} tokens, got a buffer of {slots:,} "
        "slots; make the CompressedCache with a larger room_tokens"
    )
