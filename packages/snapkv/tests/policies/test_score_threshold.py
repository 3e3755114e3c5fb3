"""A threshold for scores: by hand, by a plain reference over all that scores, and refusals."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from snapkv import (
    Random,
    ScoreThreshold,
    SnapKV,
)
from tests.families import CLOSE, call, random_ids, tiny_model
from tests.ops.states import layer_with_scores
from tests.oracle import masked_decode_logits
from tests.policies.test_selection_contract import (
    METHODS,
    batch_for,
    check,
    layer_for,
    limits,
    make,
    prompt_lengths,
    seeds,
    window_sizes,
)
from tests.policies.test_uneven import read

VOTES = [[0.5, 0.3, 0.1, 0.05], [0.2, 0.02, 0.01, 0.01]]
ONE = {"window_size": 1, "kernel_size": 1}


def kept_sets(selection, layer, row=0, heads=2):
    """One ascending list per head, positions counted from the row's first real token."""
    pads = 0 if layer.pad_tokens is None else int(layer.pad_tokens[row])
    if selection is None:
        return [list(range(layer.keys.shape[2] - pads))] * heads
    kept = [[slot for slot in head if slot >= 0] for head in selection.keep_indices[row].tolist()]
    if selection.head_tokens is not None:
        assert [len(head) for head in kept] == selection.head_tokens[row].tolist()
    return [[slot - pads for slot in head] for head in kept]


@pytest.mark.parametrize(
    ("limit", "at_least", "expected"),
    [
        ({"keep_ratio": 1.0}, 0.04, [[0, 1, 2, 3, 4], [0, 4]]),
        ({"keep_ratio": 1.0}, 0.25, [[0, 1, 4], [4]]),
        ({"budget": 3}, 0.04, [[0, 1, 4], [0, 4]]),
        ({"budget": 2}, 0.015, [[0, 4], [0, 4]]),
        ({"keep_ratio": 0.75}, 0.015, [[0, 1, 2, 4], [0, 1, 4]]),
        ({"keep_ratio": 1.0}, 2.0, [[4], [4]]),
        ({"keep_ratio": 1.0}, 0.0, [[0, 1, 2, 3, 4]] * 2),
    ],
)
def test_by_hand(limit, at_least, expected):
    """Votes [.5 .3 .1 .05] and [.2 .02 .01 .01] of one query, which stands at position 4."""
    layer = layer_with_scores(VOTES)
    policy = ScoreThreshold(SnapKV(**limit, **ONE), at_least=at_least)
    assert kept_sets(policy.select(layer), layer) == expected
    assert (policy.select(layer) is None) == (at_least == 0.0)


def test_sinks_stay_whatever_their_score_and_count_towards_the_limit():
    layer = layer_with_scores([VOTES[0][::-1], VOTES[1][::-1]])
    policy = ScoreThreshold(SnapKV(4, sink_tokens=2, **ONE), at_least=0.04)
    assert kept_sets(policy.select(layer), layer) == [[0, 1, 3, 4], [0, 1, 3, 4]]


@pytest.mark.parametrize("group_reduce", ["mean", "max", "sum", "none"])
@pytest.mark.parametrize("window_size", [1, 3, 8])
def test_votes_are_compared_as_mean_attention_whatever_the_window(window_size, group_reduce):
    policy = SnapKV(
        keep_ratio=1.0, window_size=window_size, kernel_size=1, group_reduce=group_reduce
    )
    layer = layer_for(policy, 30, 0)
    keys = layer.keys.repeat_interleave(2, dim=1)
    logits = layer.queries @ keys.mT * layer.score_options.scaling
    hidden = torch.ones(window_size, 30, dtype=torch.bool).triu(31 - window_size)
    weights = logits.masked_fill(hidden, -math.inf).softmax(dim=-1)
    means = weights[..., : 30 - window_size].mean(dim=2).view(1, 2, 2, -1)
    expected = {"max": means.amax(dim=2), "none": means.flatten(1, 2)}
    torch.testing.assert_close(policy.rated(layer), expected.get(group_reduce, means.mean(dim=2)))


def weighed_scores(policy, layer):
    """A list per head of what the threshold is compared with, sinks above all."""
    scores = policy.score(layer)[0] / policy.summed_weights(layer)
    scores[:, : policy.sink_tokens] = math.inf
    return scores.tolist()


def plain_choice(scores, tokens, limit, at_least):
    """The reference, for one head: those that score enough, the best where they are too many."""
    enough = [position for position, score in enumerate(scores) if score >= at_least]
    enough.sort(key=lambda position: (-scores[position], position))
    return sorted(enough[:limit]) + list(range(len(scores), tokens))


def between(scores, share):
    """A number between two neighbours among all scores, so that rounding cannot decide."""
    distinct = sorted({score for head in scores for score in head if math.isfinite(score)})
    gaps = [at for at in range(1, len(distinct)) if distinct[at] - distinct[at - 1] > 1e-4]
    assume(gaps)
    at = gaps[int(share * (len(gaps) - 1))]
    return (distinct[at] + distinct[at - 1]) / 2


def rounding_decides(scores, limit, at_least):
    """Whether another order of float operations may lead to another set."""
    for head in scores:
        ranked = sorted(head, reverse=True)
        if any(abs(score - at_least) < 1e-5 for score in head):
            return True
        if (
            limit < len(ranked)
            and ranked[limit - 1] - ranked[limit] < 1e-5
            and ranked[limit] >= at_least
        ):
            return True
    return False


INNER = [name for name in METHODS if not name.startswith("criticalkv")]


@pytest.mark.parametrize("method", INNER)
@check
@given(
    lengths=st.lists(prompt_lengths, min_size=1, max_size=3),
    extra=st.integers(0, 3),
    window_size=window_sizes,
    limit=limits,
    seed=seeds,
    share=st.floats(0, 1),
)
def test_every_row_keeps_what_the_reference_keeps_of_it_alone(
    method, lengths, extra, window_size, limit, seed, share
):
    inner = make(method, window_size, limit)
    rows, layer = batch_for(inner, lengths, seed, extra)
    scores = [weighed_scores(inner, row) if row.keys.shape[2] > window_size else [] for row in rows]
    at_least = between([head for row in scores for head in row], share)
    policy = ScoreThreshold(inner, at_least=at_least)
    selection = policy.select(layer)
    for row, alone in enumerate(rows):
        if not scores[row]:
            assert kept_sets(selection, layer, row)[0] == list(range(lengths[row]))
            continue
        most = inner.kept_prefix_tokens(alone)[0]
        expected = [plain_choice(head, lengths[row], most, at_least) for head in scores[row]]
        assert kept_sets(policy.select(alone), alone, heads=len(expected)) == expected
        if not rounding_decides(scores[row], most, at_least):
            assert kept_sets(selection, layer, row, len(expected)) == expected


def test_one_latent_for_all_heads_differs_among_rows_only():
    inner = SnapKV(keep_ratio=1.0, window_size=4, kernel_size=1)
    rows, layer = batch_for(inner, [30, 20], 0)
    rows = [replace(row, stored_heads=1) for row in rows]
    layer, policy = replace(layer, stored_heads=1), ScoreThreshold(inner, at_least=0.05)
    together = policy.select(layer)
    assert together.head_tokens is None
    for row, alone in enumerate(rows):
        kept = kept_sets(together, layer, row)
        assert kept == kept_sets(policy.select(alone), alone)
        assert len(kept) == 1
        filler = int(together.filler_tokens[row])
        assert together.keep_indices.shape[-1] - filler == len(kept[0]) < alone.keys.shape[2]


class Parity(Random):
    """Every other layer scores all positions above any threshold below 1."""

    def score(self, layer):
        return super().score(layer) + (layer.layer_idx % 2 == self.seed)


@pytest.mark.parametrize("seed", [0, 1], ids=["the first layer whole", "the last layer whole"])
def test_layers_that_drop_nothing_stand_beside_layers_that_do(seed):
    model, ids, tokens = tiny_model("llama"), random_ids(2, 80), random_ids(2, 4, seed=1)
    policy = ScoreThreshold(Parity(keep_ratio=1.0, window_size=8, seed=seed), at_least=0.5)
    cache = read(model, policy, ids)
    kept = [row["kept_tokens"] == 80 for row in cache.report()["layers"]]
    assert kept == [layer % 2 == seed for layer in range(4)]
    got = torch.cat([call(model, cache, token) for token in tokens.split(1, dim=1)], dim=1)
    torch.testing.assert_close(got, masked_decode_logits(model, cache, ids, tokens), **CLOSE)
