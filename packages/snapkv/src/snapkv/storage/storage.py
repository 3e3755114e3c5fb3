"""What makes the stores of a layer."""

from dataclasses import dataclass, replace
from typing import Any

from snapkv.ops import TokenCost
from snapkv.storage.base import TokenStore
from snapkv.storage.bits import KVCodes
from snapkv.storage.coded import block_bytes
from snapkv.storage.dense import DenseStore
from snapkv.storage.ragged_store import CodedStore, RaggedStore


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How a layer stores: dense, by heads of different length, or in codes; grows with every token.

    Attributes:
        codes: how what is kept of a prompt is held in few bits; None for unquantized.
    """

    codes: KVCodes | None = None

    def empty(self) -> DenseStore:
        """A store without tokens."""
        return DenseStore()

    def token_cost(self, store: TokenStore, heads: int) -> TokenCost:
        """What tokens of a store cost that so many heads keep."""
        keys, values = store.keys, store.values
        per_head = keys.element_size() * (keys.shape[-1] + values.shape[-1])
        one = TokenCost(
            full_bytes=store.num_kv_heads * per_head,
            block_bytes=heads * per_head,
        )
        if self.codes is None:
            return one
        blocks = heads * block_bytes(store.padded(), self.codes)
        return replace(one, block_bytes=blocks, block_tokens=self.codes.group_size)

    def restored(self, kind: str, state: dict[str, Any]) -> TokenStore:
        """The store of that kind whose `state` this is."""
        if kind == RaggedStore.kind:
            return RaggedStore(**state)
        if kind == CodedStore.kind:
            return CodedStore(**state)
        if kind != DenseStore.kind:
            raise ValueError(f"a {kind} store")
        return self.empty().fill(**state)
