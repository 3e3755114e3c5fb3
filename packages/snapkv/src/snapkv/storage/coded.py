"""Keys and values in few bits: how many, and what heads keep as codes."""

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from snapkv import ops
from snapkv.errors import InvalidArgumentError
from snapkv.ops import (
    BlockLayout,
    Codes,
    ScoreOptions,
    TokenCost,
    coded_attention,
    encode,
)
from snapkv.storage.base import TokenStore
from snapkv.storage.dense import DenseStore
from snapkv.storage.ragged import Counts, Pair, RaggedStates, RaggedStore
from snapkv.validation import code_bits, require_int

Bits = Literal["int8", "int4", "K8V4"]

Made = TypeVar("Made")

Number = Literal[4, 8]

_NUMBERS = (4, 8)
_GROUP_SIZES = (32, 64)


@dataclass(frozen=True)
class KVCodes:
    """How many bits hold what is kept of a prompt, and what stays as it came.

    Args:
        keys: bits of a key's integer, 8 or 4.
        values: of a value's.
        group_size: numbers that share a scale and a least number of 16 bits each, 32 or 64.
        recent_tokens: the last tokens that stay in the model's dtype; those behind a prompt are
            encoded in blocks of `group_size` when so many stand behind them.
        sink_tokens: the first kept tokens of every head that stay in the model's dtype.
        exact_layers: how many of the first and of the last compressed layers hold no codes.

    Raises:
        InvalidArgumentError: a number out of range.
        InvalidTypeError: a value that is no integer.
    """

    keys: Number = 4
    values: Number = 4
    group_size: int = 32
    recent_tokens: int = 32
    sink_tokens: int = 4
    exact_layers: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("keys", _NUMBERS), ("values", _NUMBERS), ("group_size", _GROUP_SIZES)
        ):  # fmt: skip
            given = getattr(self, name)
            if given not in allowed or isinstance(given, float):
                raise InvalidArgumentError(
                    f"{name}: expected one of {', '.join(map(str, allowed))}, got "
                    f"{given!r}; pass for instance KVCodes(keys=4, values=4)"
                )
        for name in ("recent_tokens", "sink_tokens", "exact_layers"):
            require_int(name, getattr(self, name), minimum=0)

    def has_layer(self, depth: int, num_layers: int) -> bool:
        """Whether that one of the compressed layers holds codes."""
        return min(depth, num_layers - 1 - depth) >= self.exact_layers

    def exact_tokens(self, shortest_tokens: int) -> tuple[int, int]:
        """First and last tokens that stay as they came, where the shortest head has so many."""
        last = min(self.recent_tokens, shortest_tokens)
        first = self.sink_tokens if shortest_tokens >= self.sink_tokens + last else 0
        return first, last

    @property
    def label(self) -> str:
        """Bits, such as "4"; of keys and of values where they differ, such as "8/4"."""
        return str(self.keys) if self.keys == self.values else f"{self.keys}/{self.values}"

    def costing(self, exact: TokenCost, block_bytes: int, shortest_tokens: int) -> TokenCost:
        """What tokens cost whose blocks take so many bytes in all heads, and `exact` as they came.

        The shortest row or head has so many tokens.
        """
        return replace(
            exact,
            block_bytes=block_bytes,
            block_tokens=self.group_size,
            exact_tokens=sum(self.exact_tokens(shortest_tokens)),
        )

    def block_bytes(self, states: Pair) -> int:
        """Bytes of one head's block of such keys and values: of one with the largest number."""
        blocks = both(
            lambda part: part.abs().amax().expand(1, self.group_size, part.shape[-1]), states
        )
        keys, values = encoded(blocks, self)
        return keys.nbytes + values.nbytes

    @classmethod
    def of(
        cls, given: "KVCodes | Bits | Mapping[str, Any]", argument: str = "quantize"
    ) -> "KVCodes":
        """What a word stands for, as "int4" or "K8V4"; or parameters by name, as a file has.

        Raises:
            InvalidArgumentError: another word.
        """
        if isinstance(given, KVCodes):
            return given
        if isinstance(given, Mapping):
            return cls(**given)
        bits = code_bits(given) if isinstance(given, str) else None
        if bits is None:
            raise InvalidArgumentError(
                f"{argument}: expected int8 or int4, keys and values apart as in K8V4, or a "
                f"KVCodes, got {given!r}; pass one of them"
            )
        return cls(*bits)  # type: ignore[arg-type] # they are some of these numbers

    def __str__(self) -> str:
        """Its bits in a word that `of` takes: "int4", or apart as in "K8V4"."""
        alike = self.keys == self.values
        return f"int{self.keys}" if alike else f"K{self.keys}V{self.values}"


Quantize = KVCodes | Bits


@dataclass(frozen=True, kw_only=True)
class CodedStates:
    """What every head of every row has kept, in blocks of codes; does what `RaggedStates` does.

    Attributes:
        first: keys and values of the first tokens of every head as they came, (B, H, N, D) each.
        codes: of the keys and of the values behind them.
        sections: tokens of each head in codes, by when they were encoded.
        how: with how many bits.
        least_slots: slots of the padded layout, at least.
        own_sections: how many of the sections are of heads that differ; those behind are of tokens
            that all heads have got behind the prompt.
    """

    first: Pair
    codes: tuple[Codes, Codes]
    sections: tuple[Counts, ...]
    how: KVCodes
    least_slots: int = 0
    own_sections: int = 1

    @classmethod
    def of(cls, states: RaggedStates, first_tokens: int, how: KVCodes) -> "CodedStates":
        """Encode all but the first tokens of every head, of which each has as many at least."""
        B, H = len(states.head_tokens), len(states.head_tokens[0])
        device, G = states.keys.device, how.group_size
        own = tuple(tuple(count - first_tokens for count in row) for row in states.head_tokens)
        layout = BlockLayout((own,), G, device)
        begins = states.layout.starts[:-1]
        lead = (begins[:, None] + torch.arange(first_tokens, device=device)).flatten()
        rows = begins[layout.heads][:, None] + first_tokens + layout.places
        flat = states.keys, states.values
        return cls(
            first=both(lambda part: part[lead].view(B, H, first_tokens, part.shape[1]), flat),
            codes=encoded(both(lambda part: part[rows], flat), how),
            sections=(own,),
            how=how,
            least_slots=states.longest_tokens,
        )

    @functools.cached_property
    def layout(self) -> BlockLayout:
        """Where each head's blocks stand, as attention asks for it."""
        return BlockLayout(self.sections, self.how.group_size, self.first[0].device)

    @functools.cached_property
    def head_tokens(self) -> Counts:
        """Tokens of each head."""
        first = self.first[0].shape[2]
        return tuple(tuple(first + count for count in row) for row in self.layout.head_tokens)

    @functools.cached_property
    def longest_tokens(self) -> int:
        """Slots of the padded layout."""
        return max(self.least_slots + self.grown_tokens, *(max(row) for row in self.head_tokens))

    @property
    def mean_tokens(self) -> float:
        """Tokens per row and head, on average."""
        counts = [count for row in self.head_tokens for count in row]
        return sum(counts) / len(counts)

    @property
    def nbytes(self) -> int:
        """Of codes, scales, and the first tokens."""
        first: int = self.first[0].nbytes + self.first[1].nbytes
        return first + self.codes[0].nbytes + self.codes[1].nbytes

    @property
    def index_bytes(self) -> int:
        """Of what attention needs to know of the layout."""
        return self.layout.nbytes

    def attend(
        self,
        queries: Tensor,
        tail: Pair,
        score_options: ScoreOptions,
        own_visible: Tensor | None = None,
    ) -> Tensor:
        """(B, Hq, Q, Dv): attention to them and to a tail, see `snapkv.ops.coded_attention`."""
        if self.first[0].shape[2]:
            tail = both(_behind, self.first, tail)
        keys, values = self.codes
        return coded_attention(
            queries,
            keys,
            values,
            self.layout,
            tail[0],
            tail[1],
            score_options,
            own_visible=own_visible,
        )

    def grown(self, keys: Tensor, values: Tensor) -> "CodedStates":
        """With (B, H, N, D) tokens behind them, N a number of whole blocks."""
        B, H, N, _ = keys.shape
        G = self.how.group_size
        more = encoded(
            both(lambda part: part.reshape(B * H * N // G, G, -1), (keys, values)), self.how
        )
        layout, order = self.layout.joined(((N,) * H,) * B)
        codes = both(lambda own, other: own.joined(other).blocks(order), self.codes, more)
        return replace(self, codes=codes, sections=layout.sections)

    @property
    def spread_bytes(self) -> int:
        """Bytes of the keys and values that they stand for.

        Raises:
            ValueError: parts of a file that do not fit together.
        """
        G = self.how.group_size
        tokens = sum(sum(map(sum, section)) for section in self.sections)
        blocks = sum(-(-n // G) for section in self.sections for row in section for n in row)
        rows = {(len(section), *map(len, section)) for section in self.sections}
        least = min(n for section in self.sections for row in section for n in row)
        if least < 0 or len(rows) != 1 or any(len(codes) != blocks for codes in self.codes):
            raise ValueError(f"{blocks} blocks of codes in {rows}")
        widths = (codes.channels * getattr(torch, codes.dtype).itemsize for codes in self.codes)
        return int(tokens * sum(widths) + self.first[0].nbytes + self.first[1].nbytes)

    @property
    def grown_tokens(self) -> int:
        """Tokens of every head that came behind the prompt and are codes by now."""
        return sum(section[0][0] for section in self.sections[self.own_sections :])

    def decoded(self) -> RaggedStates:
        """What they stand for."""
        layout, (first_keys, first_values) = self.layout, self.first
        B, H, N, _ = first_keys.shape
        keys, values = (
            part.decoded().flatten(0, 1).index_select(0, layout.flat) for part in self.codes
        )
        first = RaggedStates(
            keys=first_keys.flatten(0, 2),
            values=first_values.flatten(0, 2),
            head_tokens=((N,) * H,) * B,
        )
        coded = RaggedStates(keys=keys, values=values, head_tokens=layout.head_tokens)
        return replace(first.joined(coded), least_slots=self.longest_tokens)

    def select_rows(self, rows: Tensor) -> "CodedStates":
        """The rows in that order, each as often as it is named."""
        order = rows.tolist()
        chosen = self.layout.blocks_of_rows(order)
        sections = tuple(tuple(section[row] for row in order) for section in self.sections)
        keys, values = self.first
        return replace(
            self,
            first=(keys[rows.to(keys.device)], values[rows.to(keys.device)]),
            codes=both(lambda part: part.blocks(chosen), self.codes),
            sections=sections,
        )

    def only(self, stays: Tensor) -> "CodedStates":
        """The tokens of some slots of the padded layout, (B, H, S) bool, by the codes they have.

        Of the first tokens every head holds as many as it came; where heads differ in them, those
        that some have more are encoded.
        """
        N, slots = self.first[0].shape[2], stays.shape[-1]
        counts = torch.tensor(self.head_tokens, device=stays.device)[..., None]
        begins, order = slots - counts, torch.arange(slots, device=stays.device)
        coded = self._blocks_with(stays[order >= begins + N])
        there = stays.gather(2, begins + order[:N])
        places = (~there).to(torch.uint8).argsort(dim=-1, stable=True)
        kept = there.sum(dim=-1, keepdim=True)
        places = places.masked_fill(order[:N] >= kept, -1)
        fewest = int(kept.min())
        first = both(lambda part: ops.gather_tokens(part, places[..., :fewest]), self.first)
        more = RaggedStates.gather(*self.first, places[..., fewest:])
        if not len(more.keys):
            return replace(coded, first=first)
        before = CodedStates.of(more, 0, self.how)
        own = coded.own_sections + 1
        return replace(before._and(coded), first=first, own_sections=own)

    def _blocks_with(self, stays: Tensor) -> "CodedStates":
        """With some of the tokens in codes, (N,) bool, head by head: blocks keep their scales.

        Behind a block that is no longer whole its head goes on in a section of its own.
        """
        G, (B, H) = self.how.group_size, self.first[0].shape[:2]
        kept = torch.zeros(len(self.codes[0]) * G, dtype=torch.bool, device=stays.device)
        kept = kept.index_copy(0, self.layout.flat, stays).view(-1, G)
        counts = iter(kept.sum(dim=1).tolist())
        heads = [[next(counts) for _ in range(blocks)] for blocks in self.layout.head_blocks]
        later, last = self._whole_sections(heads)
        runs = [_runs(own[: len(own) - last], G) for own in heads]
        parts = list(itertools.zip_longest(*runs, fillvalue=0))
        sections = (tuple(part[row * H :][:H] for row in range(B)) for part in parts)
        chosen = [place for place, count in enumerate(itertools.chain(*heads)) if count]
        order = (~kept).to(torch.uint8).argsort(dim=1, stable=True)
        index = torch.tensor(chosen, dtype=torch.int64, device=stays.device)
        return replace(
            self,
            codes=both(lambda part: part.arranged(order).blocks(index), self.codes),
            sections=(*sections, *later),
            least_slots=0,
            own_sections=len(parts),
        )

    def _whole_sections(self, heads: list[list[int]]) -> tuple[tuple[Counts, ...], int]:
        """The last sections that lose nothing, of tokens behind the prompt; blocks of each head.

        So many tokens of every block of each head are left.
        """
        G, blocks = self.how.group_size, 0
        later: tuple[Counts, ...] = ()
        for section in reversed(self.sections[self.own_sections :]):
            more = blocks + section[0][0] // G
            if any(min(own[len(own) - more :]) < G for own in heads):
                break
            later, blocks = (section, *later), more
        return later, blocks

    def _and(self, other: "CodedStates") -> "CodedStates":
        """Of every head these blocks, and behind them those of another."""
        one, two = self.layout.head_blocks, other.layout.head_blocks
        first, second = iter(range(sum(one))), iter(range(sum(one), sum(one) + sum(two)))
        order = [
            next(blocks)
            for own, more in zip(one, two, strict=True)
            for blocks, count in ((first, own), (second, more))
            for _ in range(count)
        ]
        index = torch.tensor(order, dtype=torch.int64, device=self.first[0].device)
        codes = both(lambda a, b: a.joined(b).blocks(index), self.codes, other.codes)
        return replace(self, codes=codes, sections=(*self.sections, *other.sections), least_slots=0)

    def grown_by(self, states: RaggedStates) -> "CodedStates":
        """As `RaggedStates.grown_by`, the others in codes, too."""
        more = CodedStates.of(states, 0, self.how)
        return replace(self._and(more), own_sections=len(self.sections) + 1)

    def without_last_section(self) -> tuple["CodedStates", Pair]:
        """Without the last tokens that were encoded behind the prompt, and what they stand for."""
        (B, H), tokens = self.first[0].shape[:2], self.sections[-1][0][0]
        before = replace(self, sections=self.sections[:-1])
        _, order = before.layout.joined(self.sections[-1])
        places = order.argsort()
        left = len(order) - B * H * tokens // self.how.group_size
        codes = both(lambda part: part.blocks(places[:left]), self.codes)
        last = both(lambda part: part.blocks(places[left:]).decoded(), self.codes)
        states = both(lambda part: part.reshape(B, H, tokens, -1), last)
        return replace(before, codes=codes), states

    # What needs all of them, as they are no longer held.

    def keep(self, keep_indices: Tensor) -> RaggedStates:
        """As `RaggedStates.keep`, of what the codes stand for."""
        return self.decoded().keep(keep_indices)

    def joined(self, other: RaggedStates) -> RaggedStates:
        """As `RaggedStates.joined`, of what the codes stand for."""
        return self.decoded().joined(other)

    def padded_keys(self) -> Tensor:
        """(B, H, S, D), see `RaggedStates`."""
        return self.decoded().padded_keys()

    def padded_values(self) -> Tensor:
        """(B, H, S, Dv), see `RaggedStates`."""
        return self.decoded().padded_values()


def state_in_codes(state: dict[str, Any], how: KVCodes) -> dict[str, Any]:
    """The state of a store for a file in few bits; that of one in codes as it is.

    Heads keep their first `KVCodes.sink_tokens` as they are; what has a tail keeps that.
    """
    if "how" in state or state.get("keys") is None:
        return state
    if "states" in state:
        states, others = state["states"], state
    else:
        keys, values = state["keys"], state["values"]
        B, H, N, _ = keys.shape
        flat, counts = (keys.flatten(0, 2), values.flatten(0, 2)), ((N,) * H,) * B
        states = RaggedStates(keys=flat[0], values=flat[1], head_tokens=counts)
        others = {name: part for name, part in state.items() if name not in ("keys", "values")}
    if not len(states.keys):
        return state
    shortest = min(min(row) for row in states.head_tokens)
    first, _ = replace(how, recent_tokens=0).exact_tokens(shortest)
    return others | {"states": CodedStates.of(states, first, how)}


def state_spread(state: dict[str, Any]) -> dict[str, Any]:
    """The state that `state_in_codes` was given, as near as the bits tell."""
    states = state.get("states")
    if not isinstance(states, CodedStates):
        return state
    _ = states.spread_bytes  # whether its parts fit together
    if "how" in state:
        return state
    whole = states.decoded()
    if "keys" in state:
        return state | {"states": whole}
    others = {name: part for name, part in state.items() if name != "states"}
    return others | {"keys": whole.padded_keys(), "values": whole.padded_values()}


def both(make: Callable[..., Made], *pairs: tuple[Any, Any]) -> tuple[Made, Made]:
    """What is made of the keys of pairs, and of their values."""
    return make(*(pair[0] for pair in pairs)), make(*(pair[1] for pair in pairs))


def _runs(counts: list[int], block_tokens: int) -> list[int]:
    """Tokens of the sections of a head whose blocks hold so many; one that is not whole ends it."""
    runs = [0]
    is_open = True
    for count in filter(None, counts):
        if not is_open:
            runs.append(0)
        runs[-1] += count
        is_open = count == block_tokens
    return runs


def _behind(before: Tensor, states: Tensor) -> Tensor:
    return torch.cat([before, states], dim=2)


def encoded(blocks: Pair, how: KVCodes) -> tuple[Codes, Codes]:
    """(M, G, D) blocks of keys and values in codes."""
    keys, values = blocks
    return encode(keys, how.keys, along="tokens"), encode(values, how.values, along="channels")


class CodedStore(RaggedStore):
    """Heads in few bits; `keys` and `values` are their last tokens as they came, as many in each.

    Those are the last tokens of the prompt and what came behind it. All of them give way to codes,
    a block at a time, but for `KVCodes.recent_tokens`.
    """

    kind = "coded"
    is_exact = False

    @classmethod
    def of(cls, store: RaggedStore, how: KVCodes) -> "CodedStore":
        """Encode what heads keep; what stands behind it may be drafts, and waits for a step."""
        assert isinstance(store.ragged, RaggedStates)
        made = cls(
            states=store.ragged,
            keys=store.keys,
            values=store.values,
            num_kv_heads=store.num_kv_heads,
            how=how,
        )
        made._encode(store.ragged)
        return made

    def __init__(self, *, how: KVCodes, **held: Any) -> None:
        super().__init__(**held)
        self.how = how

    def finalize_step(self, drafts: int = 0) -> None:
        """Encode whole blocks of tokens that are no longer recent, nor drafts."""
        if isinstance(self.ragged, RaggedStates):
            self._encode(self.ragged)
        G = self.how.group_size
        old = max(0, self.tail_tokens - max(self.how.recent_tokens, drafts)) // G * G
        if old:
            assert isinstance(self.ragged, CodedStates)
            self.ragged = self.ragged.grown(self.keys[:, :, :old], self.values[:, :, :old])
            self._hold(self.keys[:, :, old:].clone(), self.values[:, :, old:].clone())

    def _encode(self, states: RaggedStates) -> None:
        """Their last tokens go before the tail; where heads are as short as those, so are they."""
        shortest = min(min(row) for row in states.head_tokens)
        first, last = self.how.exact_tokens(shortest)
        longest = states.longest_tokens
        padded = states.padded_keys(), states.padded_values()
        recent = both(lambda part: part[:, :, longest - last :], padded)
        older = states.keep(states.slots()[..., : longest - last])
        older = replace(older, least_slots=longest - last)
        self.ragged = CodedStates.of(older, first, self.how)
        self._hold(*both(_behind, recent, (self.keys, self.values)))

    def _hold(self, keys: Tensor, values: Tensor) -> None:
        for plane, states in zip(self.planes, (keys, values), strict=True):
            plane.states = states

    @property
    def croppable_tokens(self) -> int:
        """The tail, and what of the tokens behind the prompt is codes by now."""
        grown = self.ragged.grown_tokens if isinstance(self.ragged, CodedStates) else 0
        return self.tail_tokens + grown

    def crop(self, tokens: int) -> TokenStore:
        """Forget the last tokens; codes among them, or right before them, are decoded."""
        if tokens > self.croppable_tokens:
            return self.dense()[0].crop(tokens)
        while tokens > self.tail_tokens:
            assert isinstance(self.ragged, CodedStates)
            self.ragged, (keys, values) = self.ragged.without_last_section()
            self._hold(torch.cat([keys, self.keys], dim=2), torch.cat([values, self.values], dim=2))
        return super().crop(tokens)

    def dense(self) -> tuple[DenseStore, Tensor]:
        """What all of it stands for with as many slots in every head, and each row's empty ones."""
        store = DenseStore(in_place=False).fill(*self.padded(), self.num_kv_heads)
        counts = torch.tensor([row[0] for row in self.ragged.head_tokens], device=self.keys.device)
        return store, self.ragged.longest_tokens - counts

    @property
    def bits(self) -> str:
        """Those of the codes."""
        return self.how.label

    def state(self) -> dict[str, Any]:
        """The heads' codes and the tail."""
        return {"how": self.how, **super().state()}
