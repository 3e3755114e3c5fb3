"""The store of heads that hold the same number of tokens; it grows with every token."""

from dataclasses import replace

import torch
from torch import Tensor

from snapkv import ops
from snapkv.storage.base import TokenStore
from snapkv.storage.lent_tail import UsedSlots
from snapkv.storage.ragged import Counts, RaggedStates
from snapkv.storage.ragged_store import RaggedStore
from snapkv.storage.tail import Tail


class DenseStore(TokenStore):
    """A store in which all heads of all rows have the same number of slots."""

    kind = "dense"

    def __init__(self) -> None:
        super().__init__(0, Tail())

    @classmethod
    def of(cls, store: RaggedStore) -> "tuple[DenseStore, Tensor]":
        """Convert a ragged store into a dense store.

        The heads of each row must hold the same number of tokens, which is not checked.

        Returns:
            The store, and (B,) how many leading slots of each row hold no token.
        """
        heads = store.heads()
        made = cls().fill(*store.padded(), store.num_kv_heads)
        counts = ops.on_device([row[0] for row in heads.head_tokens], store.keys.device)
        return made, heads.longest_tokens - counts

    def fill(self, keys: Tensor | None, values: Tensor | None, num_kv_heads: int) -> "DenseStore":
        """Replace the keys and values of this store, and return the store itself.

        Args:
            keys: (B, H, S, D), or None if a file holds an empty store.
            values: (B, H, S, Dv), or None.
            num_kv_heads: as in `TokenStore`.
        """
        self.num_kv_heads = num_kv_heads
        if keys is not None and values is not None:
            self.tail.hold(keys, values)
        return self

    def select(self, indices: Tensor, tokens: int, counts: Counts | None = None) -> TokenStore:
        """Keep only some of the first tokens; see `TokenStore.select`.

        Without `counts`, `tokens` must be all slots of the store.

        Returns:
            `self`, changed in place, or a new ragged store if `counts` is not None.
        """
        if counts is not None:
            return RaggedStore.gather(self, indices, tokens, counts)
        keys, values = self.tail.written
        assert tokens == keys.shape[2]
        self.tail.hold(*ops.gather_pair(keys, values, indices))
        return self

    def select_where(self, stays: Tensor) -> TokenStore:
        """Keep only the slots that are marked in a mask.

        Args:
            stays: (B, H, S) bool, True for the slots to keep.

        Returns:
            `self`, or a ragged store if the heads of a row keep different numbers of slots. The
            tail of the ragged store begins after the last slot that some heads keep and others
            drop.
        """
        counts = stays.sum(dim=-1)
        if bool((counts == counts[:, :1]).all()):
            return self.select(ops.kept_indices(stays), self.slots)
        alike = (stays == stays[:1, :1]).flatten(0, 1).all(dim=0)
        first = self.slots - int(alike.flip(0).cumprod(0).sum())
        store = RaggedStore.gather(self, ops.kept_indices(stays[..., :first]), first)
        store._hold(lambda states: states[:, :, stays[0, 0, first:]])
        return store

    def with_room(self, used: UsedSlots, padding: Tensor | None) -> TokenStore:
        """Return a new ragged store that holds all tokens, with an append buffer of fixed address.

        See `TokenStore.with_room`. This store does not change.
        """
        store = self.as_ragged(padding, self.slots)
        store.was_dense = True
        return store.with_room(used, None)

    def as_ragged(self, padding: Tensor | None, tokens: int) -> RaggedStore:
        """Return a new ragged store whose heads hold the first `tokens` tokens.

        See `TokenStore.as_ragged`. This store does not change.
        """
        keys, values = self.tail.written
        if padding is None:
            return RaggedStore(
                states=RaggedStates.from_dense(keys[:, :, :tokens], values[:, :, :tokens]),
                keys=keys[:, :, tokens:].clone(),  # a view would keep all keys in memory
                values=values[:, :, tokens:].clone(),
                num_kv_heads=self.num_kv_heads,
            )
        slots = torch.arange(tokens, device=keys.device).expand(*keys.shape[:2], -1)
        slots = slots.masked_fill(slots < padding[:, None, None], -1)
        store = RaggedStore.gather(self, slots, tokens)
        store.ragged = replace(store.ragged.decoded(), least_slots=tokens)
        return store
