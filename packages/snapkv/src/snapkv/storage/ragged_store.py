"""Stores of heads that keep different numbers of tokens of a prompt, exact or quantized."""

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
    """Holds what the heads keep of a prompt, and separately the tokens after it, the tail.

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
        """Build a store of some of the first tokens of a store, with the later ones as its tail.

        Args:
            store: a store whose heads hold the same number of tokens.
            indices: (B, H, K) int64, slots, ascending after leading entries of -1.
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
        """Slots of the padded layout and of the tail after it."""
        return self.ragged.longest_tokens + self.tail.tokens

    @property
    def unmasked_slots(self) -> int:
        return self.ragged.longest_tokens

    @property
    def mean_tokens(self) -> float:
        counts = [count for row in self.ragged.head_tokens for count in row]
        return sum(counts) / len(counts) + self.tail.tokens

    def heads(self) -> RaggedStates:
        """Return what the heads hold, decoded if it is quantized."""
        return self.ragged.decoded()

    def absorb_tail(self) -> None:
        """Move every head's part of the tail to the head; the tail is empty then."""
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

        Args:
            rows: (N,) flat rows, one head after the other. If `counts` has more heads than are
                stored, rows of as many copies of each head.
            counts: how many rows each head keeps.
        """
        heads = self.ragged
        assert isinstance(heads, RaggedStates)  # they are quantized later, at the prompt's end
        repeats = len(counts[0]) // len(heads.head_tokens[0])
        if repeats > 1:  # all stored heads hold the same number of tokens then
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
        """Return keys and values of the last tokens; those of the heads are decoded."""
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
    """Holds quantized heads; the tail after the prompt is encoded a block at a time.

    A change of the heads decodes them, and the end of the next step encodes them again.
    """

    kind = "coded"
    is_exact = False

    @classmethod
    def of_each(cls, stores: Sequence[RaggedStore], how: KVCodes) -> "list[CodedStore]":
        """Quantize what the heads of several stores keep; their tails stay exact until a step ends.

        Raises:
            InvalidArgumentError: a number is not finite, or beyond half of float32's range.
        """
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
        """Encode heads that were decoded, and whole blocks of the tail except for drafts.

        Raises:
            InvalidArgumentError: a number is not finite, or beyond half of float32's range.
        """
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
        """Bits of the codes, such as "4" or "8/4"."""
        return self.how.label

    def state(self) -> dict[str, Any]:
        """Return the heads' codes and the tail."""
        return {"how": self.how, **super().state()}
