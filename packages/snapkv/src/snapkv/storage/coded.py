"""Quantized keys and values: what heads keep as codes."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from snapkv.ops import (
    BlockLayout,
    Codes,
    TailInputs,
    coded_attention,
    encode_all,
)
from snapkv.storage.bits import KVCodes
from snapkv.storage.ragged import Counts, RaggedStates
from snapkv.storage.tail import Pair

Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class CodedStates:
    """The quantized keys and values of one layer, with the same methods as `RaggedStates`.

    Attributes:
        codes: the codes of the keys and those of the values.
        sections: for each time at which tokens were encoded, how many tokens of each head.
        how: the number of bits, and the size of a block.
        least_slots: how many slots the padded layout had when the first section was encoded, even
            if every head has fewer tokens.
    """

    codes: tuple[Codes, Codes]
    sections: tuple[Counts, ...]
    how: KVCodes
    least_slots: int = 0

    @classmethod
    def of(cls, states: RaggedStates, how: KVCodes) -> "CodedStates":
        """Quantize the keys and values that the heads have kept.

        Raises:
            InvalidArgumentError: a number is not finite, or beyond half of float32's range.
        """
        return cls.of_each([states], how)[0]

    @classmethod
    def of_each(cls, several: Sequence[RaggedStates], how: KVCodes) -> "list[CodedStates]":
        """Quantize the keys and values of several layers together.

        The layers must be on one device. This waits for a GPU only once.

        Returns:
            New states for each layer; `several` does not change.

        Raises:
            InvalidArgumentError: a number is not finite, or beyond half of float32's range.
        """
        whole, G = RaggedStates.stack(several), how.group_size
        begins = list(itertools.accumulate(itertools.chain(*whole.head_tokens), initial=0))
        rows = BlockLayout((whole.head_tokens,), G, whole.keys.device).rows(begins)
        codes = encoded((whole.keys[rows], whole.values[rows]), how)
        if len(several) > 1 and any(part.scale.dtype is torch.float32 for part in codes):
            # Some states may fit into float16 scales if they are encoded alone.
            return [cls.of(states, how) for states in several]
        sizes = [sum(-(-n // G) for n in itertools.chain(*each.head_tokens)) for each in several]
        own = zip(*(part.split(sizes) for part in codes), strict=True)
        return [
            cls(
                codes=pair,
                sections=(states.head_tokens,),
                how=how,
                least_slots=states.longest_tokens,
            )
            for states, pair in zip(several, own, strict=True)
        ]

    @functools.cached_property
    def layout(self) -> BlockLayout:
        """The position of every block of each head, as attention needs it."""
        return BlockLayout(self.sections, self.how.group_size, self.codes[0].packed.device)

    @functools.cached_property
    def head_tokens(self) -> Counts:
        """The number of tokens in each head."""
        return self.layout.head_tokens

    @functools.cached_property
    def longest_tokens(self) -> int:
        """The number of slots in the padded layout."""
        grown = sum(section[0][0] for section in self.sections[1:])
        return max(self.least_slots + grown, *map(max, self.head_tokens))

    @property
    def nbytes(self) -> int:
        """The number of bytes that the codes and their scales take."""
        return self.codes[0].nbytes + self.codes[1].nbytes

    @property
    def index_bytes(self) -> int:
        """The number of bytes of the tensors that describe the layout."""
        return self.layout.nbytes

    def attend(self, inputs: TailInputs) -> Tensor:
        """Compute the attention of the queries to these states and to the tail.

        Returns:
            (B, Hq, Q, Dv).
        """
        return coded_attention(inputs, *self.codes, self.layout)

    def grown(self, keys: Tensor, values: Tensor) -> "CodedStates":
        """Return new states with `keys` and `values` quantized and appended to every head.

        Args:
            keys: (B, H, N, D), where N is a multiple of the group size.
            values: (B, H, N, Dv).

        Raises:
            InvalidArgumentError: a number is not finite, or beyond half of float32's range.
        """
        B, H, N, _ = keys.shape
        G = self.how.group_size
        more = encoded(
            both(lambda part: part.reshape(B * H * N // G, G, -1), (keys, values)), self.how
        )
        layout, order = self.layout.joined(((N,) * H,) * B)
        codes = both(lambda own, other: own.joined(other).blocks(order), self.codes, more)
        return replace(self, codes=codes, sections=layout.sections)

    @property
    def decoded_bytes(self) -> int:
        """The number of bytes that the keys and values take after decoding.

        Raises:
            ValueError: the codes and the sections do not fit together, as in a damaged file.
        """
        G = self.how.group_size
        tokens = sum(sum(map(sum, section)) for section in self.sections)
        blocks = sum(-(-n // G) for section in self.sections for row in section for n in row)
        rows = {(len(section), *map(len, section)) for section in self.sections}
        least = min(n for section in self.sections for row in section for n in row)
        if least < 0 or len(rows) != 1 or any(len(codes) != blocks for codes in self.codes):
            raise ValueError(f"{blocks} blocks of codes do not match {rows} rows")
        widths = (codes.channels * getattr(torch, codes.dtype).itemsize for codes in self.codes)
        return int(tokens * sum(widths))

    def decoded(self) -> RaggedStates:
        """Decode all keys and values to the dtype that they had before."""
        flat = self.layout.flat
        keys, values = (part.decoded().flatten(0, 1).index_select(0, flat) for part in self.codes)
        return RaggedStates(
            keys=keys,
            values=values,
            head_tokens=self.head_tokens,
            least_slots=self.longest_tokens,
        )

    def select_rows(self, rows: Tensor) -> "CodedStates":
        """Return states with rows of the batch in a new order; a row may be repeated.

        Args:
            rows: (new B,) integers, the old row for every new one.
        """
        order = rows.tolist()
        chosen = self.layout.blocks_of_rows(order)
        sections = tuple(tuple(section[row] for row in order) for section in self.sections)
        codes = both(lambda part: part.blocks(chosen), self.codes)
        return replace(self, codes=codes, sections=sections)


def quantize_state(state: dict[str, Any], how: KVCodes) -> dict[str, Any]:
    """Quantize the keys and values in the state of a store, so that its file is smaller.

    The tail stays exact. A state that is already quantized, or empty, is returned unchanged.

    Args:
        state: what `TokenStore.state` returned, or `keys` and `values` by name.
        how: the number of bits.

    Returns:
        A new state, or `state` itself.

    Raises:
        InvalidArgumentError: a number is not finite, or beyond half of float32's range.
    """
    if "how" in state or state.get("keys") is None:
        return state
    if "states" in state:
        states, others = state["states"], state
    else:
        states = RaggedStates.from_dense(state["keys"], state["values"])
        others = {name: part for name, part in state.items() if name not in ("keys", "values")}
    return others | {"states": CodedStates.of(states, how)} if len(states.keys) else state


def decode_state(state: dict[str, Any]) -> dict[str, Any]:
    """Decode the keys and values in a state that `quantize_state` has quantized.

    The state of a `CodedStore`, and one without quantized states, is returned unchanged.

    Raises:
        ValueError: the codes and the sections do not fit together, as in a damaged file.
    """
    states = state.get("states")
    if not isinstance(states, CodedStates):
        return state
    _ = states.decoded_bytes  # raises if its parts do not fit together
    if "how" in state:
        return state
    whole = states.decoded()
    if "keys" in state:
        return state | {"states": whole}
    others = {name: part for name, part in state.items() if name != "states"}
    return others | {"keys": whole.padded_keys(), "values": whole.padded_values()}


def both(make: Callable[..., Made], *pairs: tuple[Any, Any]) -> tuple[Made, Made]:
    """Call a function once with the keys and once with the values.

    Args:
        make: the function to call.
        pairs: pairs of keys and values; each pair is one argument of `make`.

    Returns:
        Both results, that of the keys first.
    """
    keys, values = zip(*pairs, strict=True)
    return make(*keys), make(*values)


def block_bytes(states: Pair, how: KVCodes) -> int:
    """Return the number of bytes that a quantized block of one head takes.

    The largest number in `states` decides whether the scales are float16 or float32.
    """
    blocks = both(lambda part: part.abs().amax().expand(1, how.group_size, part.shape[-1]), states)
    return sum(codes.nbytes for codes in encoded(blocks, how))


def encoded(blocks: Pair, how: KVCodes) -> tuple[Codes, Codes]:
    """Quantize blocks of keys and values together.

    Args:
        blocks: (M, G, D) keys and (M, G, Dv) values.
        how: the number of bits.

    Returns:
        The codes of the keys and those of the values, M blocks each.

    Raises:
        InvalidArgumentError: a number is not finite, or beyond half of float32's range.
    """
    keys, values = encode_all(
        [(blocks[0], how.keys, "tokens"), (blocks[1], how.values, "channels")]
    )
    return keys, values
