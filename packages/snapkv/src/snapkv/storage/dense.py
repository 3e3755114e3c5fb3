"""Keys and values of heads that hold as many tokens each; grows with every token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from snapkv.errors import InvalidArgumentError
from snapkv.storage.base import Plane, TokenStore
from snapkv.storage.codes import Bits, Codes
from snapkv.storage.ragged import RaggedStore


class DenseStore(TokenStore):
    """As many slots of every head and row.

    Args:
        in_place: append behind what is stored without copying it every time. Not where all of it is
            moved at every step anyway.
    """

    kind = "dense"

    def __init__(self, *, in_place: bool = True) -> None:
        super().__init__()
        self._in_place = in_place

    def fill(
        self,
        keys: Tensor | None,
        values: Tensor | None,
        num_kv_heads: int,
        codes: Sequence[Codes | None] = (None, None),
    ) -> "DenseStore":
        """Hold these from now on, behind what is held as codes; a file of an empty one has None."""
        self.num_kv_heads = num_kv_heads
        self.planes = tuple(
            Plane(states, own, in_place=self._in_place)
            for states, own in zip((keys, values), codes, strict=True)
            if states is not None
        )
        return self

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens; those that attention computes with are views, the first are copied."""
        if self.is_filled:
            return super().append(keys, values)
        keys, values = (
            states.clone(memory_format=torch.contiguous_format) for states in (keys, values)
        )
        self.fill(keys, values, keys.shape[1])
        return keys, values

    def keep(self, indices: Tensor, tokens: int, *, ragged: bool = False) -> TokenStore:
        if ragged:
            return RaggedStore.gather(self, indices, tokens)
        for plane in self.planes:
            plane.keep(indices, tokens)
        return self

    def encoded(self, tokens: int, bits: Bits) -> "DenseStore":
        """Another one that holds the first tokens as codes: keys along tokens, values along D."""
        store, (keys, values) = DenseStore(in_place=False), self.planes
        store.num_kv_heads = self.num_kv_heads
        store.planes = (
            keys.encoded(tokens, bits, along=-2),
            values.encoded(tokens, bits, along=-1),
        )
        return store


@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """Storage that grows with every token.

    Attributes:
        in_place: as in `DenseStore`.
        bits: "int8", "int4" or "fp8" for what is kept of a prompt; None for as it came.
    """

    in_place: bool = True
    bits: Bits | None = None
    is_compileable = False

    def empty(self) -> DenseStore:
        """A store without tokens; where there are codes every step begins with other tensors."""
        return DenseStore(in_place=self.in_place and self.bits is None)

    def finalize(self, store: TokenStore, kept_tokens: int, policy: str) -> TokenStore:
        """The store, its first tokens in few bits.

        Raises:
            InvalidArgumentError: heads keep different numbers of tokens, which codes do not.
        """
        if self.bits is None:
            return store
        if not isinstance(store, DenseStore):
            raise InvalidArgumentError(
                f"quantize: expected a policy that keeps as many tokens in every head, got "
                f"{policy}; leave quantize out"
            )
        return store.encoded(kept_tokens, self.bits) if kept_tokens else store

    def restored(self, kind: str, state: dict[str, Any]) -> TokenStore:
        if kind not in (DenseStore.kind, RaggedStore.kind if self.bits is None else "quantized"):
            raise ValueError(f"a {kind} store in dynamic storage, bits {self.bits}")
        return RaggedStore(**state) if kind == RaggedStore.kind else self.empty().fill(**state)
