"""Cases for attention to quantized ragged heads: odd lengths and several sections."""

import itertools
import sys

import pytest
import torch

from snapkv.errors import InvalidArgumentError
from snapkv.ops import BlockLayout, coded_attention, encode_all
from tests.ops.ragged_cases import (
    LENGTHS,
    OPTIONS,
    attended,
    states,
    with_options,
    with_room,
)

BITS = ((4, 4), (8, 4), (4, 8))
CASES = LENGTHS | {
    "as many blocks": ((70, 90), (65, 96)),
    "as many blocks as heads": ((20, 90), (0, 0)),
}
MORE = ((32, 32), (32, 32))
"""A section that every head has grown by."""


def encode(states, bits, *, along):
    """`encode_all` of one."""
    (codes,) = encode_all([(states, bits, along)])
    return codes


def coded_states(lengths, queries, bits, *, block_tokens=32, grown=False, dtype=torch.float32):
    """Arguments of `coded_attention` by name, for 2 rows, 2 KV heads and 4 query heads."""
    given = states(lengths, queries, dtype=dtype)
    layout = BlockLayout((lengths,), block_tokens, torch.device("cpu"))
    keys, values = (
        encode(blocks_of(given[name], layout), some, along=along)
        for name, some, along in zip(("keys", "values"), bits, ("tokens", "channels"), strict=True)
    )
    if grown:
        more = states(MORE, queries, dtype=dtype)
        section = BlockLayout((MORE,), block_tokens, torch.device("cpu"))
        layout, order = layout.joined(MORE)
        keys, values = (
            codes.joined(
                encode(blocks_of(more[name], section), codes.bits, along=codes.along)
            ).blocks(order)
            for name, codes in (("keys", keys), ("values", values))
        )
    return given | {"keys": keys, "values": values, "layout": layout}


def blocks_of(flat, layout):
    """(M, G, D): flat states in the blocks of a layout of one section."""
    counts = itertools.chain(*layout.sections[0])
    return flat[layout.rows(list(itertools.accumulate(counts, initial=0)))]


def require_reference(impl, *, cases=tuple(CASES), query_counts=(1, 3, 40)):
    """The cases of an implementation against the reference."""
    for turn, lengths in enumerate(map(CASES.get, cases)):
        for place, queries in enumerate(query_counts):
            bits = BITS[(turn + queries) % len(BITS)]
            given = coded_states(lengths, queries, bits, grown=(turn + place) % 2 == 1)
            for options in OPTIONS.values():
                given = with_options(given, options)
                expected = attended(coded_attention, given, impl="reference")
                for stored in (given, with_room(given)):
                    got = attended(coded_attention, stored, impl=impl)
                    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def require_encoding(device="cpu", dtypes=(torch.float16, torch.bfloat16, torch.float32)):
    """The kernel's scales and least numbers are torch's, its codes but for those half way."""
    from snapkv.ops.codes import triton_coding

    for dtype, bits, along in itertools.product(dtypes, (4, 8), ("tokens", "channels")):
        generator = torch.Generator().manual_seed(bits)
        for G, D in ((32, 64), (64, 32), (16, 48)):
            states = torch.randn(5, G, D, generator=generator).mul_(4)
            states[1], states[2, :, 0] = 3.0, states[2, :, 0] * 1000
            given = states.to(dtype), bits
            expected = encode(*given, along=along)
            got = triton_coding.encode(given[0].to(device), bits, along)
            for part in ("scale", "least"):
                assert torch.equal(getattr(got, part).cpu(), getattr(expected, part)), part
            apart = (got.integers().cpu() - expected.integers()).abs()
            assert apart.max() <= 1
            assert apart.mean() < 0.005
    for place in (0, 1):  # what is no number is refused
        keys, values = parts = torch.ones(2, 2, 32, 64, device=device)
        parts[place, 1, 3, 5] = float("nan")
        with pytest.raises(InvalidArgumentError, match="quantize: the largest value for"):
            triton_coding.encode_all([(keys, 8, "tokens"), (values, 4, "channels")])


if __name__ == "__main__":
    require_reference(sys.argv[1], cases=("one past a block",), query_counts=(3,))
    require_reference(sys.argv[1], cases=("as many blocks", "tiny"), query_counts=(1,))
    require_encoding()
