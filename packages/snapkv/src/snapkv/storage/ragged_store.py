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
    """A store in which heads may keep different numbers of tokens of the prompt.

    The tokens after the prompt are in the tail: `keys` and `values`, (B, H, N, D), the same number
    for every head. `was_dense` tells that a `DenseStore` became this store for as long as it has
    room.
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
        """Create a ragged store from some of the first tokens of a store, and all later ones.

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
        """The number of slots of the padded layout and of the tail together."""
        return self.ragged.longest_tokens + self.tail.tokens

    @property
    def unmasked_slots(self) -> int:
        return self.ragged.longest_tokens

    @property
    def mean_tokens(self) -> float:
        counts = [count for row in self.ragged.head_tokens for count in row]
        return sum(counts) / len(counts) + self.tail.tokens

    def heads(self) -> RaggedStates:
        """Return the keys and values of the heads, decoded if they are quantized."""
        return self.ragged.decoded()

    def as_ragged(self, padding: Tensor | None, tokens: int) -> "RaggedStore":
        return self

    def absorb_tail(self) -> None:
        """Append the tokens of the tail to the heads, so that the tail is empty."""
        slots, heads = self.slots, self.heads()
        tail = RaggedStates.from_dense(*self.tail.written)
        self.ragged = replace(heads.joined(tail), least_slots=slots)
        self._hold(lambda states: states[..., :0, :].clone())

    def select(self, indices: Tensor, tokens: int, counts: Counts | None = None) -> TokenStore:
        """Keep only some of the tokens of the heads; the tail does not change.

        The arguments are those of `TokenStore.select`; `tokens` must be `unmasked_slots`.
        """
        assert tokens == self.unmasked_slots
        self.ragged = self.heads().select(indices, counts)
        return self

    def select_flat(self, rows: Tensor, counts: Counts) -> None:
        """Keep only the tokens in the given rows of the heads' keys and values.

        Changes the store in place. The heads must not be quantized.

        Args:
            rows: (N,) row numbers, one head after the other. If `counts` has more heads than are
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
        """Keep only the slots that are marked in a mask.

        Tokens of the tail that only some of the heads keep are moved from the tail to these heads.

        Args:
            stays: (B, H, S) bool, True for the slots to keep.
        """
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
        """Remove the last `tokens` tokens of every head, beginning with those of the tail."""
        last = min(tokens, self.tail.tokens)
        if last:
            super().truncate(last)
        if own := tokens - last:
            heads = self.heads()
            self.ragged = heads.select(heads.slots()[..., : heads.longest_tokens - own])
        return self

    def last(self, tokens: int) -> Pair:
        """Return the keys and values of the last tokens, decoded if they are quantized."""
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
        """Select the given rows of the batch, in this order.

        There are fewer slots afterwards if the row of the longest head is gone.
        """
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
    """A store that quantizes the tokens of its heads, and later those of its tail.

    The tail is quantized in whole blocks. A change of the heads decodes them, and the end of the
    next step quantizes them again.
    """

    kind = "coded"
    is_exact = False

    @classmethod
    def of_each(cls, stores: Sequence[RaggedStore], how: KVCodes) -> "list[CodedStore]":
        """Quantize the heads of several stores together; the tails stay exact until a step ends.

        Returns:
            New stores, which share the tails with `stores`; those do not change.

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
        """Quantize the heads if they were decoded, and all full blocks of the tail.

        Args:
            drafts: how many of the last tokens are drafts, which stay exact.

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
        """The number of bits of the quantized numbers, such as "4" or "8/4"."""
        return self.how.label

    def state(self) -> dict[str, Any]:
        """Return everything that a file needs to restore the store, with quantized heads."""
        return {"how": self.how, **super().state()}
