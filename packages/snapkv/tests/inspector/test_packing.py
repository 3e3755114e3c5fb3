"""What the page draws: bits and levels by hand; the vote of one head, whose rows add up to it."""

import base64
import itertools
from dataclasses import replace

import pytest
import torch

from snapkv import H2O, AdaKV, KeyDiff, PyramidKV, SnapKV, StreamingLLM
from snapkv.inspector.packing import (
    Heat,
    heat,
    is_logarithmic,
    levels,
    packed_bits,
    packed_scores,
    win_order,
    window_weights,
)
from snapkv.inspector.scores import SeenLayer
from snapkv.ops import ScoreOptions
from snapkv.policies import PromptLayer

TOKENS, QUERY_HEADS, KV_HEADS = 40, 4, 2


def seen_of(policy, layer):
    return SeenLayer.of_all(policy, [layer])[0]


def layer(seed=0, sink_logits=None):
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 1, KV_HEADS, TOKENS, 8, generator=generator)
    return PromptLayer(
        queries=torch.randn(1, QUERY_HEADS, TOKENS, 8, generator=generator),
        keys=keys,
        values=values,
        score_options=ScoreOptions(scaling=0.5, sink_logits=sink_logits),
        layer_idx=5,
    )


def numbers(text):
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.int32).tolist()


@pytest.mark.parametrize("sinks", [None, torch.tensor([3.0, 0.0, 1.0, 2.0])], ids=["", "sinks"])
@pytest.mark.parametrize("how", ["mean", "sum", "none"])
@pytest.mark.parametrize("pooling", [{"pooling": "fading"}, {"kernel_size": 1}], ids=str)
@pytest.mark.parametrize("voters", [2, 4, 7])
def test_the_rows_add_up_to_the_votes(voters, how, pooling, sinks):
    policy = SnapKV(16, window_size=4, voters=voters, group_reduce=how, **pooling)
    seen = seen_of(policy, layer(sink_logits=sinks))
    for head in range(QUERY_HEADS if how == "none" else KV_HEADS):
        weights = window_weights(seen, head)
        assert weights.shape == (voters, TOKENS - 4)
        votes = seen.scores if seen.votes is None else seen.votes
        torch.testing.assert_close(weights.sum(0), votes[head])


def test_the_rows_are_the_softmax_of_every_query():
    """Two query heads share a key head; the maximum over both, by a loop."""
    states = layer()
    seen = seen_of(SnapKV(16, window_size=2, group_reduce="max"), states)
    expected = torch.zeros(2, TOKENS - 2)
    for row, head in itertools.product(range(2), range(2)):
        at = TOKENS - 2 + row
        scores = 0.5 * states.keys[0, 0, : at + 1] @ states.queries[0, head, at]
        expected[row] = torch.maximum(expected[row], scores.softmax(0)[: TOKENS - 2])
    torch.testing.assert_close(window_weights(seen, 0), expected)


@pytest.mark.parametrize(
    "policy",
    [
        SnapKV(16, window_size=4),
        SnapKV(16, window_size=4, pooling="fading"),
        SnapKV(40, window_size=4),
        PyramidKV(16, window_size=4),
        AdaKV(SnapKV(16, window_size=4)),
        KeyDiff(16, window_size=4),
    ],
    ids=str,
)
def test_the_order_gives_what_a_real_selection_keeps(policy):
    seen = seen_of(policy, layer())
    for head, kept in enumerate(seen.kept):
        order = win_order(seen, head)
        prefix = kept[: len(order)]
        best = order[: int(prefix.sum())]
        assert sorted(best.tolist()) == prefix.nonzero()[:, 0].tolist()
        assert sorted(order.tolist()) == list(range(len(order)))


@pytest.mark.parametrize("budget", [5, 20, 35])
def test_the_order_of_one_budget_gives_every_other_one(budget):
    order = win_order(seen_of(SnapKV(16, window_size=4), layer()), 1)
    kept = seen_of(SnapKV(budget, window_size=4), layer()).kept[1]
    assert sorted(order[: budget - 4].tolist()) == kept[:-4].nonzero()[:, 0].tolist()


@pytest.mark.parametrize("policy", [H2O(16), StreamingLLM(16)], ids=str)
def test_a_method_that_chooses_otherwise_has_no_order(policy):
    assert win_order(seen_of(policy, layer()), 0) is None


def test_an_order_that_does_not_give_what_was_kept_is_none():
    seen = seen_of(SnapKV(16, window_size=4), layer())
    seen.kept[0, :-4] = ~seen.kept[0, :-4]
    assert win_order(seen, 0) is None


def test_a_head_that_keeps_more_than_the_slider_follows_has_none(monkeypatch):
    seen = seen_of(SnapKV(16, window_size=4), layer())
    assert heat([seen], (0, 1, 0.5)).order is not None
    monkeypatch.setattr("snapkv.inspector.packing.MOST_RANKS", 11)
    assert heat([seen], (0, 1, 0.5)).order is None


def test_the_picture_of_a_head():
    seen = seen_of(SnapKV(16, window_size=4), layer())
    made = heat([seen], (0, 1, 0.25))
    assert (made.layer, made.head, made.share, made.rows, made.bin_tokens) == (5, 1, 0.25, 4, 1)
    assert made.best_tokens == 12
    assert numbers(made.order) == win_order(seen, 1).tolist()
    levels = list(base64.b64decode(made.weights))
    assert len(levels) == 4 * (TOKENS - 4)
    weights = window_weights(seen, 1).flatten()
    assert levels[weights.argmax()] == 255  # one scale for all rows
    assert levels.count(255) == 1
    assert heat([seen], None) is None


def test_a_method_without_a_window_has_bars_only():
    made = heat([seen_of(KeyDiff(16, window_size=4), layer())], (0, 0, 0.5))
    bars = Heat(layer=5, head=0, share=0.5, prefix_tokens=36, best_tokens=12)
    assert made == replace(bars, order=made.order)


def test_long_prompts_stay_small(monkeypatch):
    monkeypatch.setattr("snapkv.inspector.packing.MOST_WEIGHT_BYTES", 50)
    monkeypatch.setattr("snapkv.inspector.packing.MOST_RANKS", 12)
    seen = seen_of(SnapKV(16, window_size=4), layer())
    made = heat([seen], (0, 0, 0.5))
    assert made.bin_tokens == 3
    assert len(base64.b64decode(made.weights)) == 4 * 12
    assert numbers(made.order) == win_order(seen, 0)[:12].tolist()
    assert made.prefix_tokens == TOKENS - 4


def raw(text):
    return list(base64.b64decode(text))


def test_the_first_position_is_the_lowest_bit_and_heads_begin_on_bytes():
    kept = torch.tensor([[1, 0, 0, 1, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0, 1, 0]]).bool()
    assert raw(packed_bits(kept)) == [0b1001, 1, 0b10000000, 0]


def test_levels_are_powers_of_ten_below_the_highest():
    scores = torch.tensor([[1.0, 0.1, 1e-3, 1e-6, 1e-9, 0.0]])
    expected = [255, 255 * 5 / 6, 127.5, 0, 0, 0]
    assert levels(scores, scores)[0].tolist() == pytest.approx(expected, abs=0.01)


def test_levels_are_even_where_a_score_is_negative():
    scores = torch.tensor([[-1.0, 0.0, 1.0]])
    assert not is_logarithmic(scores)
    assert levels(scores, scores)[0].tolist() == pytest.approx([0, 127.5, 255])


def test_a_bin_shows_its_highest_score_and_each_head_its_own_scale():
    scores = torch.tensor([[0.1, 1.0, 0.01, 0.001, 1.0], [0.0, 0.0, 5.0, 0.0, 0.5]])
    assert raw(packed_scores(scores, 2)) == [255, round(255 * 4 / 6), 255, 0, 255, 212]


def test_a_head_without_any_vote_is_empty():
    assert raw(packed_scores(torch.zeros(1, 3), 1)) == [0, 0, 0]
