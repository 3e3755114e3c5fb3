"""Static storage: tensors stay where they are, so that a CUDA graph of decoding can be captured.

A compiled decoding step, or a CUDA graph that was captured of one, replays for every later prompt.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from snapkv.errors import InvalidArgumentError, UnsupportedModelError
from snapkv.ops import Codes, TokenCost
from snapkv.storage.base import TokenStore
from snapkv.storage.bits import KVCodes
from snapkv.storage.coded import both, encoded
from snapkv.storage.dense import DenseStore
from snapkv.storage.tail import GrowingTail, Pair


class StaticStore(TokenStore):
    """Tokens in buffers with empty slots after them; how many are filled is a tensor.

    A step counts it up by itself; the model's own mask hides the empty slots.

    Args:
        storage: whose buffers these are.
        store: what is stored now.
    """

    kind = "static"
    is_static = True

    def __init__(self, storage: "Static", store: TokenStore) -> None:
        super().__init__(store.num_kv_heads, GrowingTail(None, None, in_place=False))
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

    def only(self, stays: Tensor) -> TokenStore:
        """Refused, as `keep`."""
        raise NotImplementedError("a static store keeps all it holds")

    def crop(self, tokens: int) -> TokenStore:
        self.filled.sub_(tokens)
        return self

    def select_rows(self, rows: Tensor) -> TokenStore:
        rows = rows.to(self.keys.device)
        self._move_in(self.keys[rows], self.values[rows], self.slots)
        return self

    @property
    def free_slots(self) -> int:
        """For how many tokens there is room."""
        return self.storage.slots - self.slots

    def room_for(self, tokens: int) -> None:
        require_room(self.slots + tokens, self.storage.slots)

    def last(self, tokens: int) -> tuple[Tensor, Tensor]:
        end = self.slots
        return self.keys[:, :, end - tokens : end], self.values[:, :, end - tokens : end]

    def state(self) -> dict[str, Any]:
        keys, values = self.padded()
        return {"keys": keys, "values": values, "num_kv_heads": self.num_kv_heads}

    def _move_in(self, keys: Tensor, values: Tensor, tokens: int) -> None:
        """Fill the first slots of the buffers."""
        slots = self.storage.slots
        filled = torch.tensor(tokens, device=keys.device)
        *buffers, self.filled = self.storage.buffers_for(
            (keys, {2: slots}), (values, {2: slots}), (filled, {})
        )
        self.tail.hold(*buffers)
        for buffer, states in zip(buffers, (keys, values), strict=True):
            buffer[:, :, :tokens] = states[:, :, :tokens]
        self.filled.fill_(tokens)


class StaticCodedStore(StaticStore):
    """What is kept of a prompt in codes, all else in buffers; a step is handed what they stand for.

    Slots are those of a static store: the first tokens, codes, and the tokens after them. The
    buffers hold both ends, one after the other. Nothing that is generated becomes codes.

    Args:
        storage: whose buffers these are.
        codes: of keys and values, blocks of codes, as many of every head, rows first.
        keys: (B, H, N, D), the tokens at both ends.
        values: (B, H, N, Dv).
        first_tokens: how many of those stand before the codes.
        coded_tokens: of each head.
        num_kv_heads: as of every store.
    """

    kind = "static coded"
    is_exact = False

    def __init__(
        self,
        storage: "Static",
        *,
        codes: tuple[Codes, Codes],
        keys: Tensor,
        values: Tensor,
        first_tokens: int,
        coded_tokens: int,
        num_kv_heads: int,
    ) -> None:
        TokenStore.__init__(self, num_kv_heads, GrowingTail(None, None, in_place=False))
        assert storage.codes is not None
        self.storage, self.first_tokens = storage, first_tokens
        self._heads, self._group = keys.shape[:2], storage.codes.group_size
        if any(len(part) * self._group < coded_tokens * self._heads.numel() for part in codes):
            raise ValueError(f"{len(codes[0])} blocks of codes for {coded_tokens} tokens")
        self._hold(codes, (keys, values), coded_tokens)

    @classmethod
    def of(cls, storage: "Static", store: TokenStore, kept_tokens: int) -> "StaticCodedStore":
        """Encode the first tokens of a store but for those that stay unquantized."""
        assert storage.codes is not None
        how, states = storage.codes, (store.keys, store.values)
        first, last = how.exact_tokens(kept_tokens)
        end = kept_tokens - last

        def in_blocks(part: Tensor) -> Tensor:
            """(M, G, D), the last block of a head filled up with its last token."""
            inner = part[:, :, first:end]
            missing = -inner.shape[2] % how.group_size
            inner = torch.cat([inner, inner[:, :, -1:].expand(-1, -1, missing, -1)], dim=2)
            return inner.reshape(-1, how.group_size, part.shape[3])

        def ends(part: Tensor) -> Tensor:
            return torch.cat([part[:, :, :first], part[:, :, end:]], dim=2)

        keys, values = both(ends, states)
        return cls(
            storage,
            codes=encoded(both(in_blocks, states), how),
            keys=keys,
            values=values,
            first_tokens=first,
            coded_tokens=end - first,
            num_kv_heads=store.num_kv_heads,
        )

    def _hold(self, codes: tuple[Codes, Codes], ends: Pair, coded_tokens: int) -> None:
        """Fill the buffers."""
        heads, tokens = self._heads.numel(), ends[0].shape[2]
        require_room(tokens, self.storage.end_slots)
        blocks = [
            torch.unflatten(part, 0, (heads, len(part) // heads))
            for each in codes
            for part in (each.packed, each.scale, each.least)
        ]
        sizes = [(part, {1: self.storage.coded_slots // self._group}) for part in blocks]
        order = torch.arange(self.storage.slots, device=ends[0].device)
        number = torch.tensor(0, device=ends[0].device)
        made = self.storage.buffers_for(
            *((part, {2: self.storage.end_slots}) for part in ends),
            *((part, {}) for part in (number, number, order)),
            *sizes,
        )
        self.tail.hold(*made[:2])
        self.filled, self._coded, self._order, *buffers = made[2:]
        for buffer, part in zip(made[:2], ends, strict=True):
            buffer[:, :, :tokens] = part
        for buffer, part in zip(buffers, blocks, strict=True):
            buffer[:, : part.shape[1]] = part
        self._codes = both(_with_parts, codes, (buffers[:3], buffers[3:]))
        self._note(tokens + coded_tokens, coded_tokens)

    def _note(self, slots: int, coded_tokens: int) -> None:
        """So many slots are filled, of which so many hold codes."""
        first, behind = self.first_tokens, self.storage.coded_slots
        order = torch.arange(self.storage.slots, device=self.keys.device)
        of_ends = (behind + order - coded_tokens).clamp(max=behind + self.storage.end_slots - 1)
        of_ends = of_ends.where(order >= first, behind + order)
        is_coded = (order >= first) & (order < first + coded_tokens)
        self._order.copy_((order - first).where(is_coded, of_ends))
        self._coded.fill_(coded_tokens)
        self.filled.fill_(slots)

    @property
    def _whole(self) -> Pair:
        """(B, H, slots, D) what all slots stand for."""
        codes = tuple(each.decoded() for each in self._codes)
        keys, values = (
            torch.cat([inner.reshape(*self._heads, -1, ends.shape[3]), ends], dim=2)
            for inner, ends in zip(codes, (self.keys, self.values), strict=True)
        )
        return keys.index_select(2, self._order), values.index_select(2, self._order)

    @property
    def written_tokens(self) -> int:
        return self.slots - int(self._coded)

    def append(self, keys: Tensor, values: Tensor) -> Pair:
        new_tokens = keys.shape[-2]
        places = torch.arange(new_tokens, device=keys.device) + (self.filled - self._coded)
        self.filled.add_(new_tokens)
        self.keys.index_copy_(2, places, keys)
        self.values.index_copy_(2, places, values)
        return self._whole

    def crop(self, tokens: int) -> TokenStore:
        left, coded = self.slots - tokens, int(self._coded)
        self._note(left, max(0, min(coded, left - self.first_tokens)))
        return self

    def select_rows(self, rows: Tensor) -> TokenStore:
        state, rows = self.state(), rows.to(self.keys.device)
        heads, blocks = self._heads[1], len(state["codes"][0]) // self._heads.numel()
        of_row = torch.arange(heads * blocks, device=rows.device)
        chosen = (rows[:, None] * heads * blocks + of_row).flatten()
        codes = both(lambda part: part.blocks(chosen), state["codes"])
        self._heads = torch.Size((len(rows), heads))
        self._hold(codes, (state["keys"][rows], state["values"][rows]), state["coded_tokens"])
        return self

    @property
    def free_slots(self) -> int:
        return self.storage.end_slots - self.slots + int(self._coded)

    def room_for(self, tokens: int) -> None:
        require_room(self.slots - int(self._coded) + tokens, self.storage.end_slots)

    def last(self, tokens: int) -> Pair:
        end = self.slots
        return both(lambda part: part[:, :, end - tokens : end], self._whole)

    @property
    def bits(self) -> str:
        assert self.storage.codes is not None
        return self.storage.codes.label

    @property
    def held_bytes(self) -> int:
        return super().held_bytes + sum(codes.nbytes for codes in self._codes)

    @property
    def index_bytes(self) -> int:
        return int(self._order.nbytes)

    def state(self) -> dict[str, Any]:
        """Codes and both ends, as far as they are filled."""
        coded = int(self._coded)
        ends, heads = self.slots - coded, self._heads.numel()
        blocks = torch.arange(-(-coded // self._group), device=self.keys.device)
        rows = torch.arange(heads, device=self.keys.device)[:, None]
        chosen = (rows * (self.storage.coded_slots // self._group) + blocks).flatten()
        return {
            "codes": both(lambda part: part.blocks(chosen), self._codes),
            "keys": self.keys[:, :, :ends],
            "values": self.values[:, :, :ends],
            "first_tokens": self.first_tokens,
            "coded_tokens": coded,
            "num_kv_heads": self.num_kv_heads,
        }


def _with_parts(codes: Codes, parts: list[Tensor]) -> Codes:
    """Codes that are views of buffers, (B * H, blocks of a head, ...)."""
    packed, scale, least = (part.flatten(0, 1) for part in parts)
    return replace(codes, packed=packed, scale=scale, least=least)


class Static:
    """Storage in buffers that are made for the first prompt and used again for every other one.

    Until a prompt ends it grows as any other does; then what is kept of it moves in. The buffers
    are made again where batch, dtype or device are others than before.

    Args:
        slots: size of the buffers, in tokens.
        room_tokens: how many of them are for what is generated.
        codes: how what is kept of a prompt is held in few bits; None for unquantized.
    """

    is_compileable = True

    def __init__(self, slots: int, room_tokens: int, codes: KVCodes | None = None) -> None:
        self.slots, self.room_tokens, self.codes = slots, room_tokens, codes
        self._buffers: list[Tensor] = []

    def at(self, depth: int, num_layers: int) -> "Static":
        if self.codes is None or self.codes.has_layer(depth, num_layers):
            return self
        return Static(self.slots, self.room_tokens)

    @property
    def coded_slots(self) -> int:
        """Room for codes, in whole blocks, whatever the length of a prompt."""
        assert self.codes is not None
        recent, sinks, G = self.codes.recent_tokens, self.codes.sink_tokens, self.codes.group_size
        inner = self.slots - self.room_tokens - recent  # short prompts have no tokens in front
        return -(-max(inner - sinks, min(inner, sinks), 0) // G) * G

    @property
    def end_slots(self) -> int:
        """Room for what stays unquantized."""
        assert self.codes is not None
        ends = self.codes.recent_tokens + self.codes.sink_tokens
        return min(self.slots - self.room_tokens, ends) + self.room_tokens

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
        del empty
        if store.unmasked_slots or store.keys.shape[1] != store.num_kv_heads:
            raise UnsupportedModelError(
                f"storage: expected one set of tokens per KV head and as many in each for "
                f"storage='static', got policy {policy}; use storage='dynamic'"
            )
        require_room(store.slots, self.slots)
        if self.codes is None:
            return StaticStore(self, store)
        return StaticCodedStore.of(self, store, kept_tokens)

    def token_cost(self, store: TokenStore, heads: int, shortest_tokens: int) -> TokenCost:
        """Refused when the storage is chosen: its buffers need a number of tokens."""
        raise NotImplementedError("static storage has a budget of tokens")

    def restored(self, kind: str, state: dict[str, Any]) -> TokenStore:
        if kind == StaticCodedStore.kind and self.codes is not None:
            return StaticCodedStore(self, **state)
        if kind not in (StaticStore.kind, DenseStore.kind):
            raise ValueError(f"a {kind} store in static storage")
        store = self.empty().fill(**state)
        return self.finalize(store, 0, "", None) if kind == StaticStore.kind else store

    def buffers_for(self, *wanted: tuple[Tensor, dict[int, int]]) -> list[Tensor]:
        """Buffers like these tensors, but for the sizes of some axes."""
        shapes = [
            tuple(sizes.get(axis, size) for axis, size in enumerate(part.shape))
            for part, sizes in wanted
        ]
        alike = len(self._buffers) == len(wanted) and all(
            (buffer.shape, buffer.dtype, buffer.device) == (shape, part.dtype, part.device)
            for buffer, shape, (part, _) in zip(self._buffers, shapes, wanted, strict=True)
        )
        if not alike:
            with torch.inference_mode(False):  # or they could be changed in that mode only
                self._buffers = [
                    torch.zeros(shape, dtype=part.dtype, device=part.device)
                    for shape, (part, _) in zip(shapes, wanted, strict=True)
                ]
            for tensor in self._buffers:
                torch._dynamo.mark_static_address(tensor)  # or CUDA graphs would copy it every step
        return self._buffers


def require_room(stored_tokens: int, slots: int) -> None:
    """Refuse more tokens than a buffer has slots."""
    if stored_tokens > slots:
        raise InvalidArgumentError(
            f"room_tokens: expected room for {stored_tokens:,} tokens, got a buffer of {slots:,} "
            "slots; make the CompressedCache with a larger room_tokens"
        )
