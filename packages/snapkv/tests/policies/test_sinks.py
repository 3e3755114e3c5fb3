"""Sinks: a row's first tokens stay in every head, within the budget, wherever a method is used."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapkv import InvalidArgumentError
from snapkv.policies import AdaKV, CriticalKV, KVzap, KVzip, PrefixPolicy
from snapkv.policies.pyramidkv import LayerBudget
from tests.gates import drawn_gate
from tests.ops.states import pad_left, random_layer, rated_layer
from tests.policies.test_parameters import WITH_SINKS


class Falling(KVzip):
    """KVzip with budgets that fall with depth."""

    @property
    def allocation(self):
        return LayerBudget(super().allocation, beta=20)


MAKERS = {policy.name: policy for policy in WITH_SINKS} | {
    "kvzap": lambda **own: KVzap(gate=drawn_gate(), **own),
    "falling budgets": Falling,
}
WRAPPERS = {
    "itself": lambda policy: policy,
    "adakv": lambda policy: AdaKV(policy, safeguard=0.01),
    "criticalkv": CriticalKV,
    "criticalkv, by values": lambda policy: CriticalKV(policy, first_share=1e-9),
    "adakv of criticalkv": lambda policy: AdaKV(CriticalKV(policy), safeguard=0.01),
}


def rated(*heads):
    return rated_layer(heads, output_weight=torch.ones(1, len(heads)))


def kept(policy, layer):
    return policy.select(layer).keep_indices.tolist()


def test_heads_share_out_what_the_sinks_leave_by_hand():
    """Of four places a sink takes two; behind it one head has all winners, and a tenth is sure."""
    layer = rated([0.0, 0.1, 0.9, 0.3, 0.8, 0.0], [0.0, 0.2, 0.1, 0.1, 0.0, 0.0])
    selection = AdaKV(KVzip(3, window_size=1, sink_tokens=1), safeguard=0.1).select(layer)
    assert selection.keep_indices.tolist() == [[[0, 2, 4, 5], [-1, -1, 0, 5]]]
    assert selection.head_tokens.tolist() == [[4, 2]]


@pytest.mark.parametrize(
    ("method", "wrap"),
    [
        (method, wrap)
        for place, method in enumerate(MAKERS.values())
        for wrap in list(WRAPPERS.values())[place % 2 :: 2]
    ],
)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    extra=st.integers(0, 4),
    sinks=st.integers(0, 6),
    window_size=st.integers(1, 5),
    limit=st.one_of(st.integers(0, 9), st.floats(0.01, 1.0)),
    seed=st.integers(0, 10_000),
)
def test_every_head_keeps_them_within_the_budget(
    method, wrap, lengths, extra, sinks, window_size, limit, seed
):
    beside = limit if isinstance(limit, int) else 0
    limits = (
        {"budget": window_size + max(1, sinks) + beside}
        if isinstance(limit, int)
        else {"keep_ratio": limit}
    )
    base = method(**limits, window_size=window_size, sink_tokens=sinks)
    policy, queries = wrap(base), min(base.query_tokens, 40)
    rows = [
        random_layer(seed + i, prompt_tokens=tokens, query_tokens=queries)
        for i, tokens in enumerate(lengths)
    ]
    layer = pad_left(rows, query_tokens=queries, extra=extra) if len(rows) + extra > 1 else rows[0]
    layer = dataclasses.replace(layer, depth=seed % 4, num_layers=4)
    selection = policy.select(layer)
    if selection is None:
        return
    places = base.counts(base.prefix(layer))
    for row, tokens in enumerate(layer.row_lengths):
        pads = layer.keys.shape[2] - tokens
        heads = [
            [slot - pads for slot in head if slot >= pads]
            for head in selection.keep_indices[row].tolist()
        ]
        own = places[row] + min(tokens, window_size)
        assert sum(map(len, heads)) == own * len(heads)
        for head in heads:
            assert head == sorted(set(head))
            assert head[: min(sinks, places[row])] == list(range(min(sinks, places[row])))


def test_a_method_of_ones_own_has_them_by_declaring_them():
    @dataclasses.dataclass(frozen=True)
    class Latest(PrefixPolicy):
        name = "latest"
        sink_tokens: int = dataclasses.field(default=2, kw_only=True)

        @property
        def query_tokens(self):
            return 0

        def score(self, layer):
            return layer.received[..., : -self.window_size]

    layer = rated([0.0, 0.1, 0.2, 0.3, 0.4, 0.0])
    assert kept(Latest(4, window_size=1), layer) == [[[0, 1, 4, 5]]]
    with pytest.raises(InvalidArgumentError, match="sink_tokens: expected at least 0"):
        Latest(4, window_size=1, sink_tokens=-1)
