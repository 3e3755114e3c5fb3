"""Keys and values of heads that hold as many tokens each; grows with every token."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from snapkv.storage.append_buffer import AppendBuffer
from snapkv.storage.base import RowChange, TokenStore, keep_tokens
from snapkv.storage.ragged import RaggedStore


class DenseStore(TokenStore):
    """One tensor of keys and one of values.

    Args:
        in_place: append behind what is stored without copying it every time. Not where all of it is
            moved at every step anyway.
    """

    kind = "dense"

    def __init__(self, *, in_place: bool = True) -> None:
        self.keys = self.values = None
        self.num_kv_heads = 0
        self._buffer = AppendBuffer() if in_place else None

    def fill(self, keys: Tensor, values: Tensor, num_kv_heads: int) -> "DenseStore":
        """Hold these from now on."""
        self.keys, self.values, self.num_kv_heads = keys, values, num_kv_heads
        return self

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens; those of one head for every head that keeps a set of its own."""
        if not self.is_filled:
            self.fill(_copied(keys), _copied(values), keys.shape[1])
            return self.keys, self.values
        keys, values = self.for_heads(keys), self.for_heads(values)
        if self._buffer is None:
            self.keys = torch.cat([self.keys, keys], dim=-2)
            self.values = torch.cat([self.values, values], dim=-2)
        else:
            self.keys, self.values = self._buffer.append(self.keys, self.values, keys, values)
        return self.keys, self.values

    def keep(self, indices: Tensor, tokens: int) -> TokenStore:
        """Keep some of the first tokens, and all behind them."""
        self.keys = keep_tokens(self.keys, indices, tokens)
        self.values = keep_tokens(self.values, indices, tokens)
        return self

    def __copy__(self) -> "DenseStore":
        """One with a buffer of its own: only one may write behind what both hold."""
        copied = DenseStore(in_place=self._buffer is not None)
        return copied.fill(self.keys, self.values, self.num_kv_heads)

    def crop(self, tokens: int) -> TokenStore:
        """Forget the last tokens."""
        self.keys, self.values = self.keys[..., :-tokens, :], self.values[..., :-tokens, :]
        return self

    def map_rows(self, change: RowChange) -> TokenStore:
        """Put the rows in another order."""
        self.keys, self.values = change(self.keys), change(self.values)
        return self


@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """Storage that grows with every token.

    Attributes:
        in_place: as in `DenseStore`.
    """

    in_place: bool = True
    is_compileable = False

    def empty(self) -> DenseStore:
        """A store without tokens."""
        return DenseStore(in_place=self.in_place)

    def finalize(self, store: TokenStore, kept_tokens: int, policy: str) -> TokenStore:
        """The store as it is."""
        del kept_tokens, policy
        return store

    def restored(self, kind: str, state: dict[str, Any]) -> TokenStore:
        """A dense or a ragged store.

        Raises:
            ValueError: another kind.
        """
        if kind == RaggedStore.kind:
            return RaggedStore(**state)
        if kind != DenseStore.kind:
            raise ValueError(f"a {kind} store in dynamic storage")
        return self.empty().fill(**state)


def _copied(states: Tensor) -> Tensor:
    """The states in memory of their own: those that attention computes with are views."""
    return states.clone(memory_format=torch.contiguous_format)
