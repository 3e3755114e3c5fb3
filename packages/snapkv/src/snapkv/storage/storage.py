"""What makes the stores of a layer: one protocol, of `dynamic` and `static`."""

from typing import Any, Protocol

from torch import Tensor

from snapkv.ops import TokenCost
from snapkv.storage.base import TokenStore
from snapkv.storage.bits import KVCodes
from snapkv.storage.dense import DenseStore


class Storage(Protocol):
    """How a layer stores: what it begins with, and what it goes on with after a prompt."""

    @property
    def is_compileable(self) -> bool:
        """Whether the decoding step can be compiled."""

    @property
    def codes(self) -> KVCodes | None:
        """How what is kept of a prompt is held in few bits; None for unquantized."""

    def at(self, depth: int, num_layers: int) -> "Storage":
        """That of one of the compressed layers, of which the outer ones may hold no codes."""

    def empty(self) -> DenseStore:
        """A store without tokens."""

    def finalize(self, store: TokenStore, kept_tokens: int, empty: Tensor | None) -> TokenStore:
        """The store after a prompt, of which the first slots hold what was kept.

        `empty` is (B,): how many leading slots of each row hold no token; or None.
        """

    def token_cost(self, store: TokenStore, heads: int, shortest_tokens: int) -> TokenCost:
        """What tokens of a store cost that so many heads keep; its shortest row has so many."""

    def restored(self, kind: str, state: dict[str, Any], empty: Tensor | None) -> TokenStore:
        """The store of that kind whose `state` this is; `empty` as in `finalize`."""
