"""The stores of one layer's keys and values: the tokens that heads kept of a prompt, and a tail.

    KV head 0    t5  t9  t11 t12 | t13 t14 t15  .   .    kept: 4 tokens    tail: 3, room for two
    KV head 1            t8  t12 | t13 t14 t15  .   .    kept: 2 tokens
    slot         0   1   2   3     4   5   6             padded layout: a head's tokens are the last

A slot's column is its token's place in everything seen, and its position is that without the row's
padding; `snapkv.cache.slots` computes both. Dense stores have a tail only. Attention is passed the
tail, and reads what heads kept beside it, flat or in codes.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from snapkv.ops import TokenCost
from snapkv.storage.bits import KVCodes
from snapkv.storage.coded import CodedStates, block_bytes
from snapkv.storage.lent_tail import LentTail, UsedSlots
from snapkv.storage.ragged import Counts, RaggedStates
from snapkv.storage.tail import Pair, Tail


class TokenStore(ABC):
    """Holds the keys and values of one layer's tokens, which nothing else assigns.

    Tokens are in KV cache slots. Every head has the same number of slots: if heads hold different
    numbers of tokens, each is padded on the left to the longest. A method that may change the
    layout returns the store to use from now on, which is often `self`.

    Attributes:
        tail: keys and values of tokens that all heads hold; all tokens except those in `ragged`.
        num_kv_heads: how many heads the appended keys have. The store has more heads, H, if the
            policy keeps different tokens for each query head.
        kind: name of the layout in saved files.
        has_room: whether the tail is a buffer of fixed address and size (`LentTail`), so that a
            decode step can be captured.
        is_exact: whether keys and values are stored as they were appended, none quantized.
        ragged: what heads of different lengths hold; None if all hold the same number.
    """

    kind: str
    has_room: bool = False
    is_exact: ClassVar[bool] = True
    ragged: RaggedStates | CodedStates | None = None

    def __init__(self, num_kv_heads: int, tail: Tail) -> None:
        self.num_kv_heads, self.tail = num_kv_heads, tail

    @property
    def keys(self) -> Any:
        """The keys of the tail in the form in which attention receives them.

        Their shape is (B, H, S, D); None while the store is empty.
        """
        return self.tail.keys

    @property
    def values(self) -> Any:
        """The values of the tail in the form in which attention receives them.

        Their shape is (B, H, S, Dv); None while the store is empty.
        """
        return self.tail.values

    @property
    def is_filled(self) -> bool:
        """Whether the store has ever received tokens, so that `keys` and `values` are tensors."""
        return self.tail.keys is not None

    @property
    def slots(self) -> int:
        """The number of slots that every head of every row has."""
        return self.tail.tokens

    @property
    def unmasked_slots(self) -> int:
        """The number of leading slots that have no column in the model's attention mask.

        These are the slots of ragged heads; a dense store has none.
        """
        return 0

    @property
    def mean_tokens(self) -> float:
        """The average number of tokens that a head of a row holds."""
        return self.slots

    def append(
        self, keys: Tensor, values: Tensor, coming: int = 0, *, in_place: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Store new tokens and return the keys and values for attention.

        Changes the store in place. The new tokens are the last ones of the tail that is returned.
        The first tokens of an empty store are copied into the append buffer.

        Args:
            keys: (B, num_kv_heads, N, D).
            values: (B, num_kv_heads, N, Dv).
            coming: how many more tokens are known to follow; the buffer gets free slots for them.
            in_place: whether to write into the append buffer. A policy that evicts at every step
                passes False, since all tokens are copied then anyway.

        Returns:
            All keys (B, H, S, D) and values (B, H, S, Dv) of the tail, which may be views of the
            append buffer.
        """
        if self.tail.keys is None:
            self.num_kv_heads = keys.shape[1]
            return self.tail.begin(keys, values, coming if in_place else 0)
        repeats = self.tail.keys.shape[1] // keys.shape[1]  # heads that keep a set of their own
        if repeats > 1:
            keys, values = (new.repeat_interleave(repeats, dim=1) for new in (keys, values))
        return self.tail.append(keys, values, in_place=in_place)

    @abstractmethod
    def select(self, indices: Tensor, tokens: int, counts: Counts | None = None) -> "TokenStore":
        """Keep only some of the first tokens, and keep all tokens that come after them.

        The kept keys and values do not change.

        Args:
            indices: (B, H or 1, K) int64, ascending slots after leading entries of -1, which are
                empty places: arbitrary content in a dense result, left out of a ragged one. If H is
                larger than the heads stored, each head of a group keeps its own slots.
            tokens: how many slots `indices` points into.
            counts: how many tokens each head keeps, if heads keep different numbers: its last
                entries, after a run of -1.

        Returns:
            The store to use from now on, often `self`, changed in place.
        """

    @abstractmethod
    def select_where(self, stays: Tensor) -> "TokenStore":
        """Keep only the slots that are marked in a mask.

        The kept keys and values do not change.

        Args:
            stays: (B, H, S) bool, True for the slots to keep. If the heads keep different numbers
                of slots, the shorter ones are padded on the left.

        Returns:
            The store to use from now on, often `self`, changed in place.
        """

    @abstractmethod
    def as_ragged(
        self, padding: Tensor | None, tokens: int
    ) -> Any:  # `ragged_store` imports this file
        """Return a ragged store whose heads hold the first tokens, and whose tail holds the others.

        Args:
            padding: (B,) int64, how many leading slots of each row hold no token; None for none.
            tokens: how many slots belong to the heads. A ragged store keeps its own number.

        Returns:
            A new `RaggedStore`, or `self` if it is ragged. The type cannot be named here, because
            `ragged_store` imports this file.
        """

    def truncate(self, tokens: int) -> "TokenStore":
        """Remove the last `tokens` tokens of every head.

        Returns:
            The store to use from now on, which is `self`, changed in place.
        """
        self.tail.truncate(tokens)
        return self

    def select_rows(self, rows: Tensor) -> "TokenStore":
        """Select rows of the batch in a new order.

        Args:
            rows: (new B,) integers, the old row for every new one.

        Returns:
            The store to use from now on, which is `self`, changed in place.
        """
        rows = rows.to(self.keys.device)
        self._hold(lambda states: states.index_select(0, rows))
        return self

    def _hold(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change` to the keys and values of the tail, and store the results."""
        keys, values = self.tail.written
        self.tail.hold(change(keys), change(values))

    def finalize_step(self, drafts: int = 0) -> None:
        """Do the work that is due at the end of a step, such as quantizing the new tokens.

        Changes the store in place. Does nothing if the store is not quantized.

        Args:
            drafts: how many of the last tokens are drafts, which may still be removed or moved.
        """
        del drafts

    def move_sinks(
        self,
        sink_tokens: int,
        gap: Tensor,
        rotation: Callable[[Tensor, Tensor], Tensor],
        before: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        """Rotate the keys of the attention sinks to the positions right before the next tokens.

        Changes the first keys of the store in place. They are always rotated from their original
        values, so that rounding does not accumulate.

        Args:
            sink_tokens: how many of the first keys to move.
            gap: (B,) int64, how many tokens each row has evicted after the sinks.
            rotation: rotates (B, H, N, D) states by (B, N) positions.
            before: the result of the last call, or a pair of None for the first call.

        Returns:
            (B, H, sinks, D) the original keys, and (B, 1, 1, 1) bool, whether a row's sinks are at
            other positions than their own.
        """
        moved = (gap > 0)[:, None, None, None]
        sinks = self.keys[..., :sink_tokens, :].clone()
        original, were_moved = before
        if original is not None and were_moved is not None:
            sinks = torch.where(were_moved, original, sinks)
        turned = rotation(sinks, gap[:, None].expand(-1, sink_tokens)).to(sinks.dtype)
        self.keys[..., :sink_tokens, :] = torch.where(moved, turned, sinks)
        return sinks, moved

    def with_room(self, used: UsedSlots, padding: Tensor | None) -> "TokenStore":
        """Return a store with an append buffer of fixed address, so that a step can be captured.

        New tokens are written into the buffer, see `LentTail`. A dense store returns a ragged one;
        any other store returns itself, changed in place.

        Args:
            used: says how many more tokens fit into the buffer, and counts them.
            padding: (B,) int64, how many leading slots of each row hold no token; None for none.
        """
        del padding  # ragged heads hold none
        self.tail, self.has_room = LentTail(*self.tail.written, used), True
        return self

    def leave_room(self) -> None:
        """Replace the fixed append buffer by a growing tail, which gets the tokens written so far.

        Changes the store in place.
        """
        self.tail = Tail(*(part.clone() for part in self.tail.written))
        self.has_room = False

    def last(self, tokens: int) -> Pair:
        """Return the keys and values of the last tokens.

        Args:
            tokens: how many tokens.

        Returns:
            (B, num_kv_heads, tokens, D) keys and (B, num_kv_heads, tokens, Dv) values: one set per
            KV head, even if query heads keep sets of their own.
        """
        return self._of_kv_heads(*self.tail.written, tokens)

    def _of_kv_heads(self, keys: Tensor, values: Tensor, tokens: int) -> Pair:
        repeats, start = keys.shape[1] // self.num_kv_heads, keys.shape[2] - tokens
        return keys[:, ::repeats, start:], values[:, ::repeats, start:]

    def padded(self) -> Pair:
        """Return the keys and values of all slots.

        Slots without a token hold arbitrary numbers.

        Returns:
            (B, num_kv_heads, slots, D) keys and (B, num_kv_heads, slots, Dv) values.
        """
        return self.last(self.slots)

    @property
    def held_bytes(self) -> int:
        """The number of bytes that the keys and values take in memory."""
        return int(self.keys.nbytes + self.values.nbytes) if self.is_filled else 0

    def token_cost(self, heads: int, codes: KVCodes | None) -> TokenCost:
        """Return how many bytes a token takes in the full cache, and after compression.

        Args:
            heads: how many heads keep the token.
            codes: how the token will be quantized, or None.

        Returns:
            The bytes for one row of this layer.
        """
        per_head = self.keys.element_size() * (self.keys.shape[-1] + self.values.shape[-1])
        cost = TokenCost(full_bytes=self.num_kv_heads * per_head, block_bytes=heads * per_head)
        if codes is None:
            return cost
        blocks = heads * block_bytes(self.padded(), codes)
        return replace(cost, block_bytes=blocks, block_tokens=codes.group_size)

    @property
    def bits(self) -> str:
        """The number of bits of each stored number, as text.

        Examples are "16", and "8/4" if keys are quantized to 8 bits and values to 4. It is "0"
        while the store is empty.
        """
        return str(8 * self.keys.element_size()) if self.is_filled else "0"

    @property
    def index_bytes(self) -> int:
        """The number of bytes of the tensors that describe where the tokens are stored."""
        return 0

    def state(self) -> dict[str, Any]:
        """Return everything that a file needs to restore the store.

        Returns:
            Tensors, numbers and records by name; `kinds.restored` builds the store from them.
        """
        keys, values = self.tail.written
        return {"keys": keys, "values": values, "num_kv_heads": self.num_kv_heads}

    def __copy__(self) -> Self:
        """Return a copy of the store that can be changed independently.

        The copy shares the tensors.
        """
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied.tail = copy.copy(self.tail)
        return copied
