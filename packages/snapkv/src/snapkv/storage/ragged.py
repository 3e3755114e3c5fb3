"""Ragged storage (varlen): heads that keep different numbers of tokens, one behind the other.

Per-head slots are also counted in a padded layout, as kept positions and scores have it: every head
has as many slots as the longest one, and its tokens are the last of them.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from snapkv.ops import RaggedLayout
from snapkv.storage.base import RowChange, TokenStore


@dataclass(frozen=True, kw_only=True)
class RaggedStates:
    """What every head of every row has kept, without a gap.

    Attributes:
        keys: (N, D), N the sum of `head_tokens`; rows first, then heads, then ascending positions.
        values: (N, Dv).
        head_tokens: tokens of each head, row by row: B lists of H numbers.
    """

    keys: Tensor
    values: Tensor
    head_tokens: tuple[tuple[int, ...], ...]

    @classmethod
    def gather(cls, keys: Tensor, values: Tensor, index: Tensor) -> "RaggedStates":
        """Copy the tokens of (B, H, K) slots out of (B, Hkv, T, D) states; -1 is none."""
        heads = torch.arange(index.shape[1], device=index.device) * keys.shape[1] // index.shape[1]
        rows = torch.arange(index.shape[0], device=index.device)
        kept = index >= 0
        where = (
            rows[:, None, None].expand_as(index)[kept],
            heads[None, :, None].expand_as(index)[kept],
            index[kept],
        )
        counts = tuple(tuple(row) for row in kept.sum(dim=-1).tolist())
        return cls(keys=keys[where], values=values[where], head_tokens=counts)

    def segments(self) -> list[list[tuple[Tensor, Tensor]]]:
        """For each row and head its (keys, values), views of (n, D) and (n, Dv)."""
        counts = [count for row in self.head_tokens for count in row]
        pairs = list(
            zip(torch.split(self.keys, counts), torch.split(self.values, counts), strict=True)
        )
        heads = len(self.head_tokens[0])
        return [pairs[start : start + heads] for start in range(0, len(pairs), heads)]

    def select_rows(self, rows: Tensor) -> "RaggedStates":
        """The rows in that order, each as often as it is named."""
        segments = self.segments()
        chosen = [pair for row in rows.tolist() for pair in segments[row]]
        return RaggedStates(
            keys=torch.cat([keys for keys, _ in chosen]),
            values=torch.cat([values for _, values in chosen]),
            head_tokens=tuple(self.head_tokens[row] for row in rows.tolist()),
        )

    @functools.cached_property
    def layout(self) -> RaggedLayout:
        """Where each head's tokens stand, as attention asks for it."""
        return RaggedLayout(self.head_tokens, self.keys.device)

    def joined(self, other: "RaggedStates") -> "RaggedStates":
        """Every head's tokens, and behind them those that the other has of the same head."""
        pairs = [
            pair
            for own, others in zip(self.segments(), other.segments(), strict=True)
            for both in zip(own, others, strict=True)
            for pair in both
        ]
        return RaggedStates(
            keys=torch.cat([keys for keys, _ in pairs]),
            values=torch.cat([values for _, values in pairs]),
            head_tokens=tuple(
                tuple(count + more for count, more in zip(own, others, strict=True))
                for own, others in zip(self.head_tokens, other.head_tokens, strict=True)
            ),
        )

    def with_tail(self, keys: Tensor, values: Tensor) -> "RaggedStates":
        """Every head's tokens, and behind them its part of what came behind the prompt.

        Args:
            keys: (B, H, N, D).
            values: (B, H, N, Dv).
        """
        tails = zip(keys.flatten(0, 1), values.flatten(0, 1), strict=True)
        pairs = [pair for row in self.segments() for pair in row]
        both = [piece for pair in zip(pairs, tails, strict=True) for piece in pair]
        return RaggedStates(
            keys=torch.cat([piece[0] for piece in both]),
            values=torch.cat([piece[1] for piece in both]),
            head_tokens=tuple(
                tuple(count + keys.shape[2] for count in row) for row in self.head_tokens
            ),
        )

    def padded_keys(self) -> Tensor:
        """(B, H, S, D), S the tokens of the longest head; any key in the slots of no token."""
        return self._padded(self.keys)

    def padded_values(self) -> Tensor:
        """(B, H, S, Dv), as `padded_keys`."""
        return self._padded(self.values)

    def _padded(self, states: Tensor) -> Tensor:
        slots = torch.arange(self.longest_tokens, device=states.device)
        places = self._places(slots).clamp(min=0)
        return states.index_select(0, places.flatten()).view(*places.shape, -1)

    def keep(self, keep_indices: Tensor) -> "RaggedStates":
        """Copy the tokens of these slots.

        Args:
            keep_indices: (B, H, K) int64, slots of the padded layout, ascending after a leading run
                of -1.
        """
        kept = keep_indices >= 0
        places = self._places(keep_indices)[kept]
        counts = tuple(tuple(row) for row in kept.sum(dim=-1).tolist())
        return RaggedStates(
            keys=self.keys.index_select(0, places),
            values=self.values.index_select(0, places),
            head_tokens=counts,
        )

    def _places(self, slots: Tensor) -> Tensor:
        """Where the tokens of slots of the padded layout stand: (B, H, K); negative for none."""
        counts = torch.tensor(self.head_tokens, device=self.keys.device)
        ends = counts.flatten().cumsum(0).view_as(counts)
        from_end = self.longest_tokens - slots
        places = ends[..., None] - from_end
        return places.masked_fill(from_end > counts[..., None], -1)

    @functools.cached_property
    def longest_tokens(self) -> int:
        """Tokens of the head that has most, the slots of the padded layout."""
        return max(max(row) for row in self.head_tokens)

    @property
    def mean_tokens(self) -> float:
        """Tokens per row and head, on average."""
        return self.keys.shape[0] / (len(self.head_tokens) * len(self.head_tokens[0]))

    @property
    def held_bytes(self) -> int:
        """Bytes of the keys and values."""
        return self.keys.nbytes + self.values.nbytes


class RaggedStore(TokenStore):
    """What the heads keep of a prompt, and apart from it the tokens behind it, the tail.

    `keys` and `values` are the tail, (B, H, N, D), as many tokens for every head.

    Attributes:
        states: what the heads keep.
    """

    kind = "ragged"

    def __init__(
        self, *, states: RaggedStates, keys: Tensor, values: Tensor, num_kv_heads: int
    ) -> None:
        self.states = states
        self.keys, self.values, self.num_kv_heads = keys, values, num_kv_heads

    @classmethod
    def gather(cls, store: TokenStore, indices: Tensor, tokens: int) -> "RaggedStore":
        """Keep some of the first tokens of a store; what stands behind them is the tail.

        Args:
            store: one whose heads hold as many tokens each.
            indices: (B, H, K) int64, slots, ascending after a leading run of -1.
            tokens: how many slots `indices` points into.
        """
        repeats = indices.shape[1] // store.keys.shape[1]
        keys, values = (
            states[..., tokens:, :].repeat_interleave(repeats, dim=1)  # a copy, no view
            for states in (store.keys, store.values)
        )
        states = RaggedStates.gather(store.keys, store.values, indices)
        return cls(states=states, keys=keys, values=values, num_kv_heads=store.num_kv_heads)

    @property
    def ragged(self) -> RaggedStates:
        """What the heads keep."""
        return self.states

    @property
    def tail_tokens(self) -> int:
        """N, tokens of the tail."""
        return int(self.keys.shape[2])

    @property
    def slots(self) -> int:
        """Slots of the padded layout, and behind them those of the tail."""
        return self.states.longest_tokens + self.tail_tokens

    @property
    def unmasked_slots(self) -> int:
        """The slots of what the heads keep; ragged attention needs no mask for them."""
        return self.states.longest_tokens

    @property
    def croppable_tokens(self) -> int:
        """The tail."""
        return self.tail_tokens

    @property
    def mean_tokens(self) -> float:
        """Tokens per row and head, on average."""
        return self.tail_tokens + self.states.mean_tokens

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens in the tail."""
        self.keys = torch.cat([self.keys, self.for_heads(keys)], dim=-2)
        self.values = torch.cat([self.values, self.for_heads(values)], dim=-2)
        return self.keys, self.values

    def absorb_tail(self) -> None:
        """Give every head its part of the tail, which is empty then."""
        self.states = self.states.with_tail(self.keys, self.values)
        self.keys, self.values = self.keys[..., :0, :].clone(), self.values[..., :0, :].clone()

    def keep(self, indices: Tensor, tokens: int) -> TokenStore:
        """Keep some of what the heads keep; slots of the padded layout, -1 for none.

        The tail has been absorbed, or stands behind those slots.
        """
        assert tokens == self.states.longest_tokens
        self.states = self.states.keep(indices)
        return self

    def padded(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all slots, those of the tail last."""
        keys, values = self.states.padded_keys(), self.states.padded_values()
        if not self.tail_tokens:
            return keys, values
        return torch.cat([keys, self.keys], dim=2), torch.cat([values, self.values], dim=2)

    def crop(self, tokens: int) -> TokenStore:
        """Forget the last tokens of the tail."""
        self.keys, self.values = self.keys[..., :-tokens, :], self.values[..., :-tokens, :]
        return self

    def map_rows(self, change: RowChange) -> TokenStore:
        """Put the rows in another order; the longest head may be gone with its row."""
        self.states = self.states.select_rows(change(torch.arange(self.keys.shape[0])))
        self.keys, self.values = change(self.keys), change(self.values)
        return self

    @property
    def held_bytes(self) -> int:
        """Bytes of the keys and values, the tail included."""
        return self.states.held_bytes + super().held_bytes

    @property
    def index_bytes(self) -> int:
        """Bytes of what attention needs to know of the layout."""
        return self.states.layout.held_bytes

    def state(self) -> dict[str, Any]:
        """The heads' tokens and the tail."""
        return {"states": self.states, **super().state()}
