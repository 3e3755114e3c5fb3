"""Stores of heads that keep different numbers of tokens of a prompt, as they are or in codes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from snapkv import ops
from snapkv.storage.base import TokenStore
from snapkv.storage.bits import KVCodes
from snapkv.storage.coded import CodedStates
from snapkv.storage.ragged import Counts, RaggedStates
from snapkv.storage.tail import Pair, Tail


class RaggedStore(TokenStore):
    """What the heads keep of a prompt, and apart from it the tokens after it, the tail.

    `keys` and `values` are the tail, (B, H, N, D), as many tokens for every head. `was_dense` tells
    that a `DenseStore` became this store for as long as it has room.
    """

    kind = "ragged"
    was_dense = False
    ragged: RaggedStates | CodedStates

    def __init__(
        self, *, states: RaggedStates | CodedStates, keys: Tensor, values: Tensor, num_kv_heads: int
    ) -> None:
        super().__init__(num_kv_heads, Tail(keys, values))
        self.ragged = states

    @classmethod
    def gather(
        cls, store: TokenStore, indices: Tensor, tokens: int, counts: Counts | None = None
    ) -> "RaggedStore":
        """Keep some of the first tokens of a store; what comes after them is the tail.

        Args:
            store: one whose heads hold as many tokens each.
            indices: (B, H, K) int64, slots, ascending after a leading run of -1.
            tokens: how many slots `indices` points into.
            counts: as in `RaggedStates.gather`.
        """
        tail, states = store.tail, RaggedStates.gather(*store.tail.written, indices, counts)
        repeats = len(states.head_tokens[0]) // tail.keys.shape[1]
        return cls(  # of copies, no views
            states=states,
            keys=tail.keys[..., tokens:, :].repeat_interleave(repeats, dim=1),
            values=tail.values[..., tokens:, :].repeat_interleave(repeats, dim=1),
            num_kv_heads=store.num_kv_heads,
        )

    @property
    def slots(self) -> int:
        """Slots of the padded layout, and after them those of the tail."""
        return self.ragged.longest_tokens + self.tail.tokens

    @property
    def unmasked_slots(self) -> int:
        return self.ragged.longest_tokens

    @property
    def mean_tokens(self) -> float:
        counts = [count for row in self.ragged.head_tokens for count in row]
        return sum(counts) / len(counts) + self.tail.tokens

    def heads(self) -> RaggedStates:
        """What the heads hold, or what their codes stand for."""
        return self.ragged.decoded()

    def absorb_tail(self) -> None:
        """Give every head its part of the tail, which is empty then."""
        slots, heads = self.slots, self.heads()
        tail = RaggedStates.whole(*self.tail.written)
        self.ragged = replace(heads.joined(tail), least_slots=slots)
        self._hold(lambda states: states[..., :0, :].clone())

    def select(self, indices: Tensor, tokens: int, counts: Counts | None = None) -> TokenStore:
        """Keep some of what the heads keep; the tail comes after those slots, or is absorbed."""
        assert tokens == self.unmasked_slots
        self.ragged = self.heads().select(indices, counts)
        return self

    def select_flat(self, rows: Tensor, counts: Counts) -> None:
        """Keep (N,) rows of what heads hold, one head after the other, so many of each.

        Of a prompt, which no token comes after. Where more heads are counted than are stored, rows
        are those of as many copies of each.
        """
        heads = self.ragged
        assert isinstance(heads, RaggedStates)  # they are encoded at a prompt's end
        repeats = len(counts[0]) // len(heads.head_tokens[0])
        if repeats > 1:  # all of which hold as many
            tokens = heads.longest_tokens
            rows = rows // (tokens * repeats) * tokens + rows % tokens
            self._hold(lambda states: states.repeat_interleave(repeats, dim=1))
        self.ragged = heads.select_flat(rows, counts)

    def select_where(self, stays: Tensor) -> TokenStore:
        """Keep the slots that stay; what not all heads keep of the tail moves to the heads."""
        longest, heads = self.unmasked_slots, self.heads()
        tail = ops.kept_indices(stays[..., longest:])
        last = int(stays[..., longest:].sum(dim=-1).min())
        self.ragged = heads.select(ops.kept_indices(stays[..., :longest]))
        if more := tail.shape[-1] - last:
            older = RaggedStates.gather(self.keys, self.values, tail[..., :more])
            self.ragged = self.ragged.joined(older)
        self._hold(lambda states: ops.gather_tokens(states, tail[..., more:]))
        return self

    def truncate(self, tokens: int) -> TokenStore:
        """Forget the last tokens, of every head as many: those of the tail, then its own."""
        last = min(tokens, self.tail.tokens)
        if last:
            super().truncate(last)
        if own := tokens - last:
            heads = self.heads()
            self.ragged = heads.select(heads.slots()[..., : heads.longest_tokens - own])
        return self

    def last(self, tokens: int) -> Pair:
        """As of every store; what is with the heads by what that stands for."""
        if tokens <= self.tail.tokens:
            return super().last(tokens)
        return self._of_kv_heads(*self.padded(), tokens)

    def padded(self) -> Pair:
        heads, (keys, values) = self.heads(), self.tail.written
        padded = heads.padded_keys(), heads.padded_values()
        if not self.tail.tokens:
            return padded
        return torch.cat([padded[0], keys], dim=2), torch.cat([padded[1], values], dim=2)

    def select_rows(self, rows: Tensor) -> TokenStore:
        """Put the rows in another order; the longest head may be gone with its row."""
        super().select_rows(rows)
        self.ragged = self.ragged.select_rows(rows)
        return self

    @property
    def held_bytes(self) -> int:
        return self.ragged.nbytes + super().held_bytes

    @property
    def index_bytes(self) -> int:
        return self.ragged.index_bytes

    def state(self) -> dict[str, Any]:
        return {**super().state(), "states": self.ragged}


class CodedStore(RaggedStore):
    """Heads in few bits; the tail, what came after the prompt, is encoded a block at a time.

    What changes the heads decodes them; the end of the next step encodes them again.
    """

    kind = "coded"
    is_exact = False

    @classmethod
    def of_each(cls, stores: Sequence[RaggedStore], how: KVCodes) -> "list[CodedStore]":
        """Encode what heads keep; what comes after it may be drafts, and waits for a step."""
        exact = [store.ragged.decoded() for store in stores]
        return [
            cls(
                states=states,
                keys=store.keys,
                values=store.values,
                num_kv_heads=store.num_kv_heads,
                how=how,
            )
            for store, states in zip(stores, CodedStates.of_each(exact, how), strict=True)
        ]

    def __init__(self, *, how: KVCodes, **held: Any) -> None:
        super().__init__(**held)
        self.how = how

    def finalize_step(self, drafts: int = 0) -> None:
        """Encode whole blocks of the tail but for drafts."""
        if isinstance(self.ragged, RaggedStates):
            self.ragged = CodedStates.of(self.ragged, self.how)
        G = self.how.group_size
        old = max(0, self.tail.tokens - drafts) // G * G
        if old:
            assert isinstance(self.ragged, CodedStates)
            keys, values = self.tail.written
            self.ragged = self.ragged.grown(keys[:, :, :old], values[:, :, :old])
            self._hold(lambda part: part[:, :, old:].clone())

    @property
    def bits(self) -> str:
        """Those of the codes."""
        return self.how.label

    def state(self) -> dict[str, Any]:
        """The heads' codes and the tail."""
        return {"how": self.how, **super().state()}
