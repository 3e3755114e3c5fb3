"""Attention of a few queries reads the keys and values of each KV head without repeating them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from snapkv.hf.attend import FEW_QUERIES, AttentionCall
from tests.pairs import pairs

B, HKV, G, S, D = 2, 2, 3, 90, 8
PAST = torch.ones(S, S, dtype=torch.bool).tril()


def call_with(queries, mask=None, **options):
    """Return a call and a list that collects the keys passed to the wrapped attention."""
    torch.manual_seed(0)
    given = []

    def attend(module, query, key, value, attention_mask, **rest):
        given.append(key)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **rest)

    call = AttentionCall(
        function=attend,
        implementation="sdpa",
        module=SimpleNamespace(num_key_value_groups=G, is_causal=True, layer_idx=0),
        query=torch.randn(B, HKV * G, queries, D),
        key=torch.randn(B, HKV, S, D),
        value=torch.randn(B, HKV, S, D + 2),
        mask=mask,
        options=options,
        branches=None,
    )
    return call, given


def plain(call, visible, scaling=D**-0.5, bias=0.0):
    """Return plain attention, (B, Q, Hq, Dv); `visible` is a (..., Q, S) bool mask."""
    key, value = (states.repeat_interleave(G, dim=1) for states in (call.key, call.value))
    scores = call.query @ key.transpose(-1, -2) * scaling + bias
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return (weights @ value).transpose(1, 2)


@pairs(queries=(1, 2, FEW_QUERIES, FEW_QUERIES + 1), kind=("none", "boolean", "additive"))
def test_causal_queries_attend_to_the_past_and_to_themselves(queries, kind):
    visible = PAST[-queries:].expand(B, 1, -1, -1).clone()
    if kind != "none":
        visible[1, :, :, :7] = False  # pads of the second row
    mask = None if kind == "none" else visible
    if kind == "additive":
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    call, given = call_with(queries, mask, scaling=0.3)
    output, _ = call.attend()
    torch.testing.assert_close(output, plain(call, visible, 0.3), atol=1e-5, rtol=1e-5)
    assert output.is_contiguous()
    assert all(key.shape[1] == HKV for key in given)


@pytest.mark.parametrize("pads", [False, True])
def test_single_bfloat16_query_is_grouped_by_kv_head(pads):
    visible = PAST[-1:].expand(B, 1, -1, -1).clone()
    if pads:
        visible[1, :, :, :7] = False
    wide, _ = call_with(1)
    narrow = {name: getattr(wide, name).bfloat16() for name in ("query", "key", "value")}
    shapes = []

    def attend(module, query, *rest, **options):
        shapes.append(tuple(query.shape))
        return sdpa_attention_forward(module, query, *rest, **options)

    call = replace(wide, mask=visible if pads else None, function=attend, **narrow)
    output, _ = call.attend()
    exact = replace(wide, **{name: states.float() for name, states in narrow.items()})
    torch.testing.assert_close(output.float(), plain(exact, visible), atol=0.02, rtol=0.02)
    assert shapes == [(B, HKV, G, D)]


def test_few_queries_of_a_group_are_passed_as_one_head():
    call, given = call_with(4)
    shapes = []

    def attend(module, query, *rest, **options):
        shapes.append((tuple(query.shape), module.num_key_value_groups))
        return call.function(module, query, *rest, **options)

    replace(call, function=attend).attend()
    assert shapes == [((B, HKV, G * 4, D), 1)]
    assert given[0] is call.key


def test_mask_or_bias_per_head_gives_same_output_as_plain_attention():
    visible = PAST[-4:].expand(B, HKV * G, -1, -1).clone()
    visible[:, 1, :, :5] = False
    call, _ = call_with(4, visible)
    output, _ = call.attend()
    torch.testing.assert_close(output, plain(call, visible), atol=1e-5, rtol=1e-5)
    bias = torch.randn(1, HKV * G, 4, S)
    call, _ = call_with(4, PAST[-4:].expand(B, 1, -1, -1), position_bias=bias)
    output, _ = call.attend()
    torch.testing.assert_close(output, plain(call, PAST[-4:], bias=bias), atol=1e-5, rtol=1e-5)
