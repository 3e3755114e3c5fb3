"""Quantized states: worked examples, error bounds, and attention that reads codes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapkv import InvalidArgumentError
from snapkv.ops import BlockLayout, ScoreOptions, TailInputs, coded_attention
from snapkv.ops.codes import blocked
from snapkv.ops.codes.reference import flat_states
from tests.ops.coded_cases import blocks_of, coded_states, encode, require_reference
from tests.ops.ragged_cases import LENGTHS, attended


def test_four_bit_codes_equal_a_worked_example():
    """Two tokens in four bits have a step of 1 along tokens and of 2 along channels."""
    states = torch.tensor([[[0.0, 1], [15, 16]]])
    keys = encode(states, 4, along="tokens")
    assert keys.packed.tolist() == [[[0, 0xFF]]]  # a byte for every token, of both channels
    torch.testing.assert_close(keys.scale.flatten(), torch.ones(2).half(), atol=2e-3, rtol=0)
    assert keys.least.flatten().tolist() == [0, 1]
    states = torch.tensor([[[0.0, 30], [30, 0]]])
    values = encode(states, 4, along="channels")  # a byte for every channel, of both tokens
    assert values.packed.tolist() == [[[[0xF0, 0x0F]]]]
    torch.testing.assert_close(values.decoded(), states, rtol=0, atol=4e-2)


@settings(deadline=None, max_examples=60)
@given(
    bits=st.sampled_from([4, 8]),
    along=st.sampled_from(["tokens", "channels"]),
    size=st.tuples(st.integers(0, 3), st.sampled_from([32, 64]), st.integers(1, 70)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([1e-6, 1.0, 900.0, 6e4, 1e9]),
    seed=st.integers(0, 99),
)
def test_decoded_numbers_differ_by_at_most_half_a_step(bits, along, size, dtype, scale, seed):
    torch.manual_seed(seed)
    most = torch.finfo(dtype).max
    states = (torch.randn(size) * scale + scale).clamp(min=-most, max=most).to(dtype)
    codes = encode(states, bits, along=along)
    step = codes.scale.float()
    if along == "tokens":
        step = step[:, None]
    else:
        step = step.mT.repeat_interleave(size[1], dim=-1)[..., : size[2]]
    ends = torch.finfo(dtype)
    back = codes.decoded().float()
    rounding = (states.float().abs() + back.abs()) * ends.eps + ends.smallest_normal
    off = (back - states.float()).abs()
    half = step * (0.5001 + 0.5 * (states.float() + step > most))  # the nearest is beyond the dtype
    assert bool((off <= half + rounding * 2).all())
    assert bool(back.isfinite().all())
    assert codes.decoded().dtype == dtype


def test_infinite_and_nan_values_are_refused():
    for number in (float("nan"), float("inf")):
        with pytest.raises(InvalidArgumentError, match="quantize: the largest value for"):
            encode(torch.full((1, 32, 2), number), 4, along="tokens")


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_decoded_blocks_have_the_order_of_flat_states(lengths):
    total = sum(map(sum, lengths))
    flat = torch.arange(total).float()[:, None]
    layout = BlockLayout((lengths,), 32, torch.device("cpu"))
    codes = encode(blocks_of(flat.expand(-1, 32), layout), 8, along="channels")
    assert flat_states(codes, layout)[:, 0].tolist() == list(range(total))


def test_joined_layout_orders_the_blocks_of_two_sections_by_head():
    """One head has 2 tokens and then 1 more, the other 1 and then 2."""
    layout, order = BlockLayout((((2, 1),),), 32, torch.device("cpu")).joined(((1, 2),))
    numbers = torch.zeros(4, 32, 1)
    numbers[0, :2, 0], numbers[1, :1, 0] = torch.tensor([1.0, 2]), torch.tensor([4.0])
    numbers[2, :1, 0], numbers[3, :2, 0] = torch.tensor([3.0]), torch.tensor([5.0, 6])
    assert order.tolist() == [0, 2, 1, 3]
    codes = encode(numbers, 8, along="channels").blocks(order)
    assert layout.head_tokens == ((3, 3),)
    torch.testing.assert_close(
        flat_states(codes, layout).flatten(), torch.arange(1.0, 7), atol=1e-2, rtol=0
    )


def test_coded_attention_of_two_heads_equals_a_worked_example():
    """The scores of the kept key and of the tail are ln 3 and 0: weights 3/4 and 1/4."""
    layout = BlockLayout((((1, 0),),), 32, torch.device("cpu"))
    key = torch.tensor(3.0).log().expand(1, 32, 1)
    zeros, fours = torch.zeros(1, 2, 1, 1), torch.full((1, 2, 1, 1), 4.0)
    got = coded_attention(
        TailInputs(torch.ones(1, 2, 1, 1), zeros, fours, ScoreOptions(scaling=1.0)),
        encode(key, 8, along="tokens"),
        encode(torch.full((1, 32, 1), 8.0), 8, along="channels"),
        layout,
        impl="reference",
    )
    torch.testing.assert_close(
        got.flatten(), torch.tensor([0.75 * 8 + 0.25 * 4, 4.0]), atol=5e-3, rtol=0
    )


@pytest.mark.parametrize("spread", [2**20, 1])
def test_blocked_coded_attention_equals_the_reference(spread, monkeypatch):
    """A `spread` of 1 unpacks one block at a time."""
    monkeypatch.setattr(blocked, "UNPACKED_ELEMENTS", spread)
    require_reference("blocked")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_blocked_coded_attention_equals_the_reference_in_low_precision(dtype):
    arguments = coded_states(LENGTHS["very uneven"], 3, (4, 4), dtype=dtype)
    got = attended(coded_attention, arguments, impl="blocked")
    expected = attended(coded_attention, arguments, impl="reference")
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)
