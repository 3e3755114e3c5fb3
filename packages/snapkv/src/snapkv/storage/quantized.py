"""Quantised storage: what is kept of a prompt is held in few bits, packed."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from snapkv.errors import InvalidArgumentError
from snapkv.storage.base import RowChange, TokenStore
from snapkv.storage.codes import Bits, Codes, quantise
from snapkv.storage.dense import DenseStore


class QuantizedStore(TokenStore):
    """Codes of a prompt's tokens; those behind it stay as they are, until the next prompt.

    While a step is computed the store is spread out, so one layer at a time is whole. The codes
    stay as they are until a later prompt ends, which is coded with what they stand for.

    Attributes:
        codes: of the keys and of the values.
        is_spread: whether `keys` and `values` begin with what the codes stand for.
    """

    kind = "quantized"
    is_exact = False

    def __init__(
        self, *, codes: tuple[Codes, Codes], keys: Tensor, values: Tensor, num_kv_heads: int
    ) -> None:
        self.codes, self.is_spread = codes, False
        self.keys, self.values, self.num_kv_heads = keys, values, num_kv_heads

    @property
    def coded_tokens(self) -> int:
        """Tokens that are held as codes."""
        return self.codes[0].shape[2]

    @property
    def slots(self) -> int:
        """Codes and tokens behind them."""
        return int(self.keys.shape[2]) + (0 if self.is_spread else self.coded_tokens)

    @property
    def held_bytes(self) -> int:
        """Bytes of the codes, their scales, and the tokens behind them."""
        return sum(codes.held_bytes for codes in self.codes) + super().held_bytes

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens; returns all stored keys and values, until `rest`."""
        stored_keys, stored_values = self._whole()
        self.keys = torch.cat([stored_keys, self.for_heads(keys)], dim=-2)
        self.values = torch.cat([stored_values, self.for_heads(values)], dim=-2)
        self.is_spread = True
        return self.keys, self.values

    def keep(self, indices: Tensor, tokens: int) -> TokenStore:
        """Keep some of the first tokens, as the codes stand for them."""
        return self._dense().keep(indices, tokens)

    def crop(self, tokens: int) -> TokenStore:
        """Forget the last tokens; where that reaches into the codes, they are given up."""
        if tokens > self.keys.shape[2] - (self.coded_tokens if self.is_spread else 0):
            return self._dense().crop(tokens)
        self.keys, self.values = self.keys[..., :-tokens, :], self.values[..., :-tokens, :]
        return self

    def map_rows(self, change: RowChange) -> TokenStore:
        """Put the rows in another order."""
        order = change(torch.arange(self.codes[0].shape[0]))
        self.codes = self.codes[0].rows(order), self.codes[1].rows(order)
        self.keys, self.values = change(self.keys), change(self.values)
        return self

    def finalize_step(self) -> None:
        """Hold the prompt's tokens as codes again, after a step."""
        if self.is_spread:
            tokens = self.coded_tokens
            self.keys = self.keys[:, :, tokens:].clone()
            self.values = self.values[:, :, tokens:].clone()
            self.is_spread = False

    def tail(self, tokens: int) -> tuple[Tensor, Tensor]:
        """The last tokens, as the codes stand for them where it reaches so far."""
        return self._dense().tail(tokens)

    def state(self) -> dict[str, Any]:
        """Codes and the tokens behind them."""
        return {"codes": self.codes, **super().state()}

    def _whole(self) -> tuple[Tensor, Tensor]:
        """What the codes stand for, and the tokens behind them."""
        if self.is_spread:
            return self.keys, self.values
        keys, values = (codes.states() for codes in self.codes)
        return torch.cat([keys, self.keys], dim=-2), torch.cat([values, self.values], dim=-2)

    def _dense(self) -> DenseStore:
        """Go on with what the codes stand for."""
        return DenseStore(in_place=False).fill(*self._whole(), self.num_kv_heads)


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """Storage in few bits.

    Attributes:
        bits: "int8", "int4" or "fp8".
    """

    bits: Bits
    is_compileable = False

    def empty(self) -> DenseStore:
        """A store without tokens; every step begins with other tensors, so it has no buffer."""
        return DenseStore(in_place=False)

    def finalize(self, store: TokenStore, kept_tokens: int, policy: str) -> TokenStore:
        """The first tokens in few bits.

        Raises:
            InvalidArgumentError: heads keep different numbers of tokens.
        """
        if store.unmasked_slots:
            raise InvalidArgumentError(
                f"quantize: expected a policy that keeps as many tokens in every head, got "
                f"{policy}; leave quantize out"
            )
        if not kept_tokens:
            return store
        codes = (
            quantise(store.keys[:, :, :kept_tokens], self.bits, along=-2),
            quantise(store.values[:, :, :kept_tokens], self.bits, along=-1),
        )
        keys, values = (states[:, :, kept_tokens:].clone() for states in (store.keys, store.values))
        return QuantizedStore(
            codes=codes, keys=keys, values=values, num_kv_heads=store.num_kv_heads
        )

    def restored(self, kind: str, state: dict[str, Any]) -> TokenStore:
        """A quantised store, or a dense one whose prompt was still coming in.

        Raises:
            ValueError: another kind.
        """
        if kind not in (QuantizedStore.kind, DenseStore.kind):
            raise ValueError(f"a {kind} store in quantised storage")
        return (
            QuantizedStore(**state) if kind == QuantizedStore.kind else self.empty().fill(**state)
        )
