"""The properties that every policy that scores the prefix must have: one suite for all.

A new method joins by itself. `Stated` reads its scores from the keys, so that the
common part is tested with any scores there are: few distinct ones, hence many ties.
"""

import math
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import ClassVar

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from snapkv.policies import POLICIES, CriticalKV, PrefixPolicy, SnapKV
from snapkv.policies.around import AroundScores
from tests.gates import drawn_gate
from tests.ops import oracle
from tests.ops.states import pad_left, random_layer, worked_layer

QUERY_HEADS, KV_HEADS = 4, 2


@dataclass(frozen=True)
class Stated(PrefixPolicy):
    """Scores a position by its key: whole numbers, so that ties are common and exact."""

    name: ClassVar[str] = "stated"

    @property
    def query_tokens(self):
        return 0

    def score(self, layer):
        prefix_tokens = layer.keys.shape[2] - self.window_size
        return layer.keys[:, :, :prefix_tokens, 0].round()


OF_THEIR_OWN = {
    "lagkv": {"lag_size": 3},
    "kvzap": {"gate": drawn_gate(layers=1)},
    "snapkv": {"kernel_size": 3},
    "pyramidkv": {"kernel_size": 3},
    "keydiff": {"sink_tokens": 3},
}
METHODS = {
    "stated": Stated,
    **{
        name: partial(policy, **OF_THEIR_OWN.get(name, {}))
        for name, policy in POLICIES.items()
        if issubclass(policy, PrefixPolicy) and not issubclass(policy, AroundScores)
    },
    "criticalkv": lambda **limits: CriticalKV(Stated(**limits)),
    "snapkv-avg": partial(SnapKV, kernel_size=5, pooling="avg"),
    "snapkv-none": partial(SnapKV, kernel_size=1, group_reduce="none"),
}

every_method = pytest.mark.parametrize("method", METHODS)
check = settings(max_examples=15, deadline=None, derandomize=True)

prompt_lengths = st.integers(1, 40)
window_sizes = st.integers(1, 8)
seeds = st.integers(0, 10_000)
limits = st.one_of(
    st.integers(1, 24).map(lambda beside_window: {"beside_window": beside_window}),
    st.floats(0.01, 1.0).map(lambda ratio: {"keep_ratio": ratio}),
)


def make(method, window_size, limit):
    if "beside_window" in limit:
        sinks = METHODS[method](keep_ratio=1).sink_tokens
        budget = window_size + sinks + limit["beside_window"]
        return METHODS[method](budget=budget, window_size=window_size)
    return METHODS[method](keep_ratio=limit["keep_ratio"], window_size=window_size)


def layer_for(policy, tokens, seed, batch=1):
    return random_layer(
        seed,
        batch=batch,
        query_heads=QUERY_HEADS,
        kv_heads=KV_HEADS,
        prompt_tokens=tokens,
        query_tokens=queries_of(policy, tokens),
    )


def queries_of(policy, tokens):
    return tokens if "queries" in policy.needs else policy.window_size


def batch_for(policy, lengths, seed, extra=0):
    rows = [layer_for(policy, tokens, seed + 97 * row) for row, tokens in enumerate(lengths)]
    return rows, pad_left(rows, query_tokens=queries_of(policy, max(lengths)), extra=extra)


def heads_of(policy):
    return QUERY_HEADS if getattr(policy, "group_reduce", "") == "none" else KV_HEADS


def kept_prefix(policy, tokens):
    kept = oracle.kept_prefix_tokens(tokens, policy.window_size, policy.budget, policy.keep_ratio)
    return max(kept, min(policy.sink_tokens, max(0, tokens - policy.window_size)))


def kept_sets(policy, layer, row=0):
    """Return an ascending list of kept positions for each head, counted after the padding."""
    selection = policy.select(layer)
    pads = 0 if layer.pad_tokens is None else int(layer.pad_tokens[row])
    if selection is None:
        return [list(range(layer.keys.shape[2] - pads))] * heads_of(policy)
    filler = 0 if selection.padding_slots is None else int(selection.padding_slots[row])
    return [
        [slot - pads for slot in head[filler:]] for head in selection.keep_indices[row].tolist()
    ]


def ranked_scores(policy, layer):
    """Return the scores of each head, where sinks have infinite scores."""
    scores = policy.score(layer)[0]
    scores[:, : policy.sink_tokens] = math.inf
    return scores.tolist()


def rounding_cannot_decide(policy, layer):
    """Whether another order of float operations must lead to the same set."""
    tokens = layer.keys.shape[2]
    if tokens <= policy.window_size:
        return True
    keep = kept_prefix(policy, tokens)
    scores = ranked_scores(policy, layer)
    return all(oracle.cut_gap(head, keep) > 1e-6 * policy.window_size for head in scores)


@every_method
@check
@given(tokens=prompt_lengths, window_size=window_sizes, limit=limits, seed=seeds)
@example(tokens=9, window_size=8, limit={"keep_ratio": 0.5}, seed=0)
@example(tokens=10, window_size=8, limit={"beside_window": 1}, seed=0)
def test_selection_is_ascending_in_range_and_exactly_as_long_as_promised(
    method, tokens, window_size, limit, seed
):
    policy = make(method, window_size, limit)
    selection = policy.select(layer_for(policy, tokens, seed, batch=2))
    prefix_tokens = max(0, tokens - window_size)
    keep = kept_prefix(policy, tokens)
    if keep == prefix_tokens:
        assert selection is None
        return
    assert selection.padding_slots is None
    assert selection.keep_indices.dtype == torch.int64
    assert selection.keep_indices.shape == (2, heads_of(policy), keep + window_size)
    for kept in selection.keep_indices.flatten(0, 1).tolist():
        assert kept == sorted(set(kept))
        assert kept[0] >= 0
        assert kept[keep:] == list(range(prefix_tokens, tokens))
        if policy.keep_ratio is None:
            assert len(kept) == policy.budget


@every_method
@check
@given(tokens=prompt_lengths, window_size=window_sizes, limit=limits, seed=seeds)
def test_lower_one_of_positions_with_equal_scores_is_kept(method, tokens, window_size, limit, seed):
    """Ties are exact: scores are whole numbers, or plateaus of max pooling."""
    policy = make(method, window_size, limit)
    layer = layer_for(policy, tokens, seed)
    keep = kept_prefix(policy, tokens)
    assume(keep < tokens - window_size)
    scores = ranked_scores(policy, layer)
    expected = [oracle.kept_positions(head, tokens, keep) for head in scores]
    assert kept_sets(policy, layer) == expected


@every_method
@check
@given(
    lengths=st.lists(prompt_lengths, min_size=1, max_size=4),
    extra=st.integers(0, 5),
    window_size=window_sizes,
    limit=limits,
    seed=seeds,
)
@example(lengths=[3, 30], extra=0, window_size=8, limit={"beside_window": 8}, seed=0)
@example(lengths=[12, 30], extra=2, window_size=8, limit={"beside_window": 8}, seed=0)
@example(lengths=[12, 30, 1], extra=0, window_size=4, limit={"keep_ratio": 0.25}, seed=0)
@example(lengths=[40, 9, 8, 7], extra=0, window_size=8, limit={"keep_ratio": 1.0}, seed=0)
def test_left_padded_row_keeps_the_same_positions_as_alone(
    method, lengths, extra, window_size, limit, seed
):
    policy = make(method, window_size, limit)
    rows, layer = batch_for(policy, lengths, seed, extra)
    selection = policy.select(layer)
    for row, tokens in enumerate(lengths) if selection is not None else ():
        padding_slots, pads = int(selection.padding_slots[row]), int(layer.pad_tokens[row])
        real = kept_prefix(policy, tokens) + min(tokens, window_size)
        assert padding_slots == selection.keep_indices.shape[-1] - real
        for kept in selection.keep_indices[row].tolist():
            assert sum(slot < pads for slot in kept) == padding_slots
            named = [slot for slot in kept if slot >= 0]
            assert kept == [-1] * (len(kept) - len(named)) + sorted(set(named))
            # Only the window, which is kept as it stands, may name a pad.
            window = layer.keys.shape[2] - window_size
            assert all(slot >= pads for slot in named if slot < window)
    assume(all(rounding_cannot_decide(policy, alone) for alone in rows))
    for row, alone in enumerate(rows):
        assert kept_sets(policy, layer, row) == kept_sets(policy, alone)


@given(ratio=st.floats(0.01, 1.0), lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=5))
@check
def test_keep_ratio_applies_to_the_prefix_of_each_row(ratio, lengths):
    policy = Stated(keep_ratio=ratio, window_size=32)
    pads = max(lengths) - torch.tensor(lengths)
    layer = worked_layer(torch.empty(len(lengths), 1, max(lengths), 1), pad_tokens=pads)
    assert policy.counts(policy.prefix(layer)) == [
        math.floor(Decimal(str(ratio)) * max(0, tokens - 32)) for tokens in lengths
    ]
