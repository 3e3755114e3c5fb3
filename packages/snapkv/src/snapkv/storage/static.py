"""Static storage: tensors stay where they are, so that a CUDA graph of decoding can be captured.

A compiled decoding step, or a CUDA graph that was captured of one, replays for every later prompt.
"""

from typing import Any

import torch
from torch import Tensor

from snapkv.errors import InvalidArgumentError, UnsupportedModelError
from snapkv.ops import TokenCost
from snapkv.storage.base import Plane, TokenStore
from snapkv.storage.dense import DenseStore


class StaticStore(TokenStore):
    """Tokens in buffers with empty slots behind them; how many are filled is a tensor.

    A step counts it up by itself; the model's own mask hides the empty slots.

    Args:
        storage: whose buffers these are.
        store: what is stored now.
    """

    kind = "static"
    is_static = True

    def __init__(self, storage: "Static", store: TokenStore) -> None:
        super().__init__(store.num_kv_heads)
        self.storage = storage
        self._move_in(store.keys, store.values, store.slots)

    @property
    def slots(self) -> int:
        return int(self.filled)

    @property
    def slot_count(self) -> int | Tensor:
        return self.filled

    def mask_columns(self, new_tokens: int) -> int:
        """All slots, filled or not."""
        del new_tokens
        return self.storage.slots

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        new_tokens = keys.shape[-2]
        slots = torch.arange(new_tokens, device=keys.device) + self.filled
        self.filled.add_(new_tokens)
        self.keys.index_copy_(2, slots, keys)
        self.values.index_copy_(2, slots, values)
        return self.keys, self.values

    def keep(self, indices: Tensor, tokens: int, *, ragged: bool = False) -> TokenStore:
        """Refused: what is chosen again is recalled first, into a store that grows."""
        raise NotImplementedError("a static store keeps all it holds")

    def crop(self, tokens: int) -> TokenStore:
        self.filled.sub_(tokens)
        return self

    def select_rows(self, rows: Tensor) -> TokenStore:
        rows = rows.to(self.keys.device)
        self._move_in(self.keys[rows], self.values[rows], self.slots)
        return self

    def room_for(self, tokens: int) -> None:
        self.storage.require_room(self.slots + tokens)

    def tail(self, tokens: int) -> tuple[Tensor, Tensor]:
        end = self.slots
        return self.keys[:, :, end - tokens : end], self.values[:, :, end - tokens : end]

    def state(self) -> dict[str, Any]:
        keys, values = self.padded()
        return {"keys": keys, "values": values, "num_kv_heads": self.num_kv_heads}

    def _move_in(self, keys: Tensor, values: Tensor, tokens: int) -> None:
        """Fill the first slots of the buffers."""
        *buffers, self.filled = self.storage.buffers_for(keys, values)
        self.planes = tuple(Plane(buffer, in_place=False) for buffer in buffers)
        for buffer, states in zip(buffers, (keys, values), strict=True):
            buffer[:, :, :tokens] = states[:, :, :tokens]
        self.filled.fill_(tokens)


class Static:
    """Storage in buffers that are made for the first prompt and used again for every other one.

    Until a prompt ends it grows as any other does; then what is kept of it moves in. The buffers
    are made anew where batch, dtype or device are others than before.

    Args:
        slots: size of the buffers, in tokens.
        room_tokens: how many of them are for what is generated.
    """

    is_compileable = True
    holds_as_it_came = True

    def __init__(self, slots: int, room_tokens: int) -> None:
        self.slots, self.room_tokens = slots, room_tokens
        self._buffers: tuple[Tensor, Tensor, Tensor] | None = None

    def like(self, store: TokenStore) -> "Static":
        del store
        return self

    def empty(self) -> DenseStore:
        return DenseStore()

    def finalize(
        self, store: TokenStore, kept_tokens: int, policy: str, empty: Tensor | None
    ) -> TokenStore:
        """What is stored, in the buffers.

        Raises:
            InvalidArgumentError: it has more tokens than there are slots.
            UnsupportedModelError: heads keep different numbers of tokens, or query heads sets of
                their own.
        """
        del kept_tokens, empty
        if store.unmasked_slots or store.keys.shape[1] != store.num_kv_heads:
            raise UnsupportedModelError(
                f"storage: expected one set of tokens per KV head and as many in each for "
                f"storage='static', got policy {policy}; use storage='dynamic'"
            )
        self.require_room(store.slots)
        return StaticStore(self, store)

    def token_cost(self, store: TokenStore, heads: int, shortest_tokens: int) -> TokenCost:
        """Refused when the storage is chosen: its buffers need a number of tokens."""
        raise NotImplementedError("static storage has a budget of tokens")

    def restored(self, kind: str, state: dict[str, Any]) -> TokenStore:
        if kind not in (StaticStore.kind, DenseStore.kind):
            raise ValueError(f"a {kind} store in static storage")
        store = self.empty().fill(**state)
        return self.finalize(store, 0, "", None) if kind == StaticStore.kind else store

    def require_room(self, stored_tokens: int) -> None:
        if stored_tokens > self.slots:
            raise InvalidArgumentError(
                f"room_tokens: expected room for {stored_tokens:,} tokens, got a buffer of "
                f"{self.slots:,} slots; make the CompressedCache with a larger room_tokens"
            )

    def buffers_for(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Buffers for such keys and values, and the number of their slots that are filled."""
        if self._buffers is None or not all(map(_alike, self._buffers, (keys, values))):
            with torch.inference_mode(False):  # or they could be changed in that mode only
                filled = torch.zeros((), dtype=torch.int64, device=keys.device)
                self._buffers = _buffer(keys, self.slots), _buffer(values, self.slots), filled
            for tensor in self._buffers:
                torch._dynamo.mark_static_address(tensor)  # or CUDA graphs would copy it every step
        return self._buffers


def _buffer(states: Tensor, slots: int) -> Tensor:
    shape = (*states.shape[:2], slots, states.shape[-1])
    return torch.zeros(shape, dtype=states.dtype, device=states.device)


def _alike(buffer: Tensor, states: Tensor) -> bool:
    same_place = buffer.device == states.device and buffer.dtype == states.dtype
    return same_place and buffer.shape[:2] == states.shape[:2]
