"""What holds the keys and values of one layer: what heads kept of a prompt, and a tail.

    KV head 0    t5  t9  t11 t12 | t13 t14 t15  .   .    kept: 4 tokens    tail: 3, room for two
    KV head 1            t8  t12 | t13 t14 t15  .   .    kept: 2 tokens
    slot         0   1   2   3     4   5   6             padded layout: a head's tokens are the last

A slot's column is its token's place in all that was seen, and its position that without the row's
pads; `snapkv.cache.slots` knows them. Dense stores have a tail alone. Attention is handed the tail,
and reads beside it what heads kept, flat or in codes.
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
from snapkv.storage.lent_tail import LentTail
from snapkv.storage.ragged import Counts, RaggedStates
from snapkv.storage.tail import Pair, Tail


class TokenStore(ABC):
    """Keys and values of one layer's tokens; nobody else assigns them.

    Tokens lie in KV cache slots. Every head has as many of them: where heads hold different numbers
    of tokens, each is padded on the left to the longest. What changes a store returns the one to go
    on with, which may be of another layout.

    Attributes:
        tail: keys and values of tokens that all heads hold; all of them but for `ragged`.
        num_kv_heads: heads of what is appended. H is more where a policy keeps one set per query
            head.
        kind: name of the layout, as saved files have it.
        has_room: whether it is lent room: its places stay, and its steps ask the host nothing.
        is_exact: whether keys and values are held as they were appended, none as codes.
        ragged: what heads of different length hold; None where all hold as many.
    """

    kind: str
    has_room: bool = False
    is_exact: ClassVar[bool] = True
    ragged: RaggedStates | CodedStates | None = None

    def __init__(self, num_kv_heads: int, tail: Tail) -> None:
        self.num_kv_heads, self.tail = num_kv_heads, tail

    @property
    def keys(self) -> Any:
        """(B, H, S, D), what attention is handed; None while empty."""
        return self.tail.keys

    @property
    def values(self) -> Any:
        """(B, H, S, Dv), what attention is handed; None while empty."""
        return self.tail.values

    @property
    def is_filled(self) -> bool:
        return self.tail.keys is not None

    @property
    def slots(self) -> int:
        """Slots of every head and row."""
        return self.tail.tokens

    @property
    def unmasked_slots(self) -> int:
        """How many of the slots are no columns of the model's mask: those of ragged heads."""
        return 0

    @property
    def mean_tokens(self) -> float:
        """Tokens per row and head, on average where they differ."""
        return self.slots

    def append(
        self, keys: Tensor, values: Tensor, coming: int = 0, *, in_place: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Store new tokens, (B, num_kv_heads, N, D); returns `keys` and `values`, they are last.

        Those that attention computes with are views: the first ones are copied, to where there is
        room for as many more as are `coming`. Not `in_place` where all of it is moved at every step
        anyway.
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
        """Keep some of the first tokens, bit for bit, and all that come after them.

        Args:
            indices: (B, H or 1, K) int64, slots; -1 for any. More heads than are stored: each of
                the groups keeps a set of its own.
            tokens: how many slots `indices` points into.
            counts: how many of them each head keeps, where it is not as many in all: its last
                ones, after a run of -1, for none.
        """

    @abstractmethod
    def select_where(self, stays: Tensor) -> "TokenStore":
        """Keep the slots that stay, bit for bit, and no others.

        Args:
            stays: (B, H, S) bool. A head for which fewer slots stay than for another one is padded
                on the left.
        """

    def truncate(self, tokens: int) -> "TokenStore":
        """Forget the last `tokens` tokens of every head."""
        self.tail.truncate(tokens)
        return self

    def select_rows(self, rows: Tensor) -> "TokenStore":
        rows = rows.to(self.keys.device)
        self._hold(lambda states: states.index_select(0, rows))
        return self

    def _hold(self, change: Callable[[Tensor], Tensor]) -> None:
        """Hold what becomes of the keys of the tail, and of its values, in their place."""
        keys, values = self.tail.written
        self.tail.hold(change(keys), change(values))

    def finalize_step(self, drafts: int = 0) -> None:
        """Called after every step: go back to what is held between steps.

        The last tokens, as many as drafts, may be taken back, or change places.
        """
        del drafts

    def move_sinks(
        self,
        sink_tokens: int,
        gap: Tensor,
        rotation: Callable[[Tensor, Tensor], Tensor],
        before: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        """Turn the first keys, in place, as if their tokens stood right before those after them.

        They always turn from their original keys, so that rounding does not add up. (B,) `gap`
        tokens of each row have been dropped after them; `before` is the last result, or None's.

        Returns:
            (B, H, sinks, D) the keys as they were first, and (B, 1, 1, 1) bool, whether a row's
            sinks stand at other positions than their own.
        """
        moved = (gap > 0)[:, None, None, None]
        sinks = self.keys[..., :sink_tokens, :].clone()
        original, were_moved = before
        if original is not None and were_moved is not None:
            sinks = torch.where(were_moved, original, sinks)
        turned = rotation(sinks, gap[:, None].expand(-1, sink_tokens)).to(sinks.dtype)
        self.keys[..., :sink_tokens, :] = torch.where(moved, turned, sinks)
        return sinks, moved

    def with_room(self, tokens: int, padding: Tensor | None) -> "TokenStore":
        """Return the store to go on with, which has room for `tokens` more tokens; see `LentTail`.

        Args:
            tokens: how many tokens there is room for.
            padding: (B,) int64, how many leading slots of each row hold no token; None for none.
        """
        del padding  # ragged heads hold none
        self.tail, self.has_room = LentTail(*self.tail.written, tokens), True
        return self

    def leave_room(self) -> None:
        """Grow from now on, with a tail of the tokens that were written."""
        self.tail = Tail(*(part.clone() for part in self.tail.written))
        self.has_room = False

    def last(self, tokens: int) -> Pair:
        """Keys and values of the last tokens, (B, num_kv_heads, tokens, D)."""
        return self._of_kv_heads(*self.tail.written, tokens)

    def _of_kv_heads(self, keys: Tensor, values: Tensor, tokens: int) -> Pair:
        """The last tokens, once where query heads of a KV head keep sets of their own."""
        repeats, start = keys.shape[1] // self.num_kv_heads, keys.shape[2] - tokens
        return keys[:, ::repeats, start:], values[:, ::repeats, start:]

    def padded(self) -> Pair:
        """Keys and values of all slots, (B, num_kv_heads, slots, D); any in slots of no token."""
        return self.last(self.slots)

    @property
    def held_bytes(self) -> int:
        """Bytes of the keys and values, measured on the tensors."""
        return int(self.keys.nbytes + self.values.nbytes) if self.is_filled else 0

    def token_cost(self, heads: int, codes: KVCodes | None) -> TokenCost:
        """What tokens cost that so many heads keep, in these codes or as they are."""
        per_head = self.keys.element_size() * (self.keys.shape[-1] + self.values.shape[-1])
        one = TokenCost(full_bytes=self.num_kv_heads * per_head, block_bytes=heads * per_head)
        if codes is None:
            return one
        blocks = heads * block_bytes(self.padded(), codes)
        return replace(one, block_bytes=blocks, block_tokens=codes.group_size)

    @property
    def bits(self) -> str:
        """Bits of a number that is kept of a prompt, such as "16"; of keys and values, "8/4"."""
        return str(8 * self.keys.element_size()) if self.is_filled else "0"

    @property
    def index_bytes(self) -> int:
        """Bytes of what says where they lie."""
        return 0

    def state(self) -> dict[str, Any]:
        """What a file has to say to make it again: tensors, numbers and records."""
        keys, values = self.tail.written
        return {"keys": keys, "values": values, "num_kv_heads": self.num_kv_heads}

    def __copy__(self) -> Self:
        """One that goes on by itself; no tensor is copied."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied.tail = copy.copy(self.tail)
        return copied
