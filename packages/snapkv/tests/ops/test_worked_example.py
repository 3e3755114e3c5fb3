"""One example small enough to check on paper, through every step of SnapKV.

One number per head and token (D = 1), four prefix positions and a window of two. The scaling is
ln 2, so that a query of 1 gives a key k the weight 2**k before normalising.

    position      0    1    2    3  |  4    5
    key           0    1    0    2  |  0    0
    query 4 = 1   1    2    1    4  |  1            of 9   (position 5 is in its future)
    query 5 = 0   1    1    1    1  |  1    1       of 6

Votes: 1/9 + 1/6 = 5/18, 2/9 + 1/6 = 7/18, 5/18, 4/9 + 1/6 = 11/18.
"""

import math
from dataclasses import replace

import pytest
import torch

from snapkv import ops
from snapkv.policies import SnapKV
from tests.ops import oracle
from tests.ops.states import worked_layer, worked_prompt

LN2 = math.log(2)
KEYS = [0.0, 1.0, 0.0, 2.0, 0.0, 0.0]
VOTES = [5 / 18, 7 / 18, 5 / 18, 11 / 18]

# A second query head, -1 then 0: query 4 gives 1, 1/2, 1, 1/4, 1 of 15/4, query 5 as above.
SECOND_HEAD = [4 / 15 + 1 / 6, 2 / 15 + 1 / 6, 4 / 15 + 1 / 6, 1 / 15 + 1 / 6]


def column(*numbers):
    """(1, 1, tokens, 1)."""
    return torch.tensor(numbers).view(1, 1, -1, 1)


def close(numbers):
    return pytest.approx(numbers, abs=1e-6)


def example(query_heads=1):
    heads = [column(1.0, 0.0), column(-1.0, 0.0)][:query_heads]
    return worked_layer(column(*KEYS), queries=torch.cat(heads, dim=1), scaling=LN2)


def test_oracle_equals_the_worked_example():
    keys = [[key] for key in KEYS]
    assert oracle.head_votes([[1.0], [0.0]], keys, LN2) == pytest.approx(VOTES, abs=1e-15)
    assert oracle.pool([5, 7, 5, 11], 3, "max") == [7, 7, 11, 11]
    assert oracle.pool([5, 7, 5, 11], 3, "avg") == [12 / 3, 17 / 3, 23 / 3, 16 / 3]
    assert oracle.best_positions([7, 7, 11, 11], 3) == [0, 2, 3]
    assert oracle.cut_gap([7, 7, 11, 11], 3) == 4
    assert oracle.cut_gap([7, 8.5, 11, 11], 2) == 2.5


NAN = float("nan")
VOTED = {  # the first query, keys, options, pads, votes
    # Position 5 attracts query 4 by 2**20; in the future it takes nothing from query 4.
    "not on what is ahead": (1.0, [*KEYS[:-1], 20.0], {}, 0, VOTES),
    # A sink logit of ln 3 adds 3 to both totals: of 12 and of 9.
    "less a sink's share": (
        1.0,
        KEYS,
        {"sink_logits": torch.tensor([math.log(3)])},
        0,
        [1 / 12 + 1 / 9, 2 / 12 + 1 / 9, 1 / 12 + 1 / 9, 4 / 12 + 1 / 9],
    ),
    # tanh of a large score is 1, so a cap of ln 2 turns 100 and 200 into the same factor of two:
    # query 4 gives 1, 2, 1, 2, 1 of 7; query 5 gives a sixth to each.
    "up to a softcap": (
        1.0,
        [0.0, 100.0, 0.0, 200.0, 0.0, 0.0],
        {"scaling": 1.0, "softcap": LN2},
        0,
        [1 / 7 + 1 / 6, 2 / 7 + 1 / 6, 1 / 7 + 1 / 6, 2 / 7 + 1 / 6],
    ),
    "not on pads": (1.0, [NAN, NAN, *KEYS], {}, 2, [0.0, 0.0, *VOTES]),
    # Query 4 is a pad too, query 5 sees only itself.
    "not by pads": (NAN, [NAN, NAN, NAN, NAN, NAN, 0.0], {}, 5, [0.0] * 4),
}


@pytest.mark.parametrize(("first", "keys", "options", "pads", "votes"), VOTED.values(), ids=VOTED)
def test_window_votes_equal_the_worked_example(first, keys, options, pads, votes):
    scoring = ops.ScoreOptions(**{"scaling": LN2} | options)
    pad_tokens = torch.tensor([pads]) if pads else None
    states = ops.AttentionStates(column(first, 0.0), column(*keys), scoring, pad_tokens)
    found = ops.window_votes(states)
    assert found[0, 0].tolist() == close(votes)
    assert (found[0, 0] == 0).tolist() == [vote == 0 for vote in votes]


def test_reduced_votes_of_grouped_heads_equal_the_worked_example():
    layer = example(query_heads=2)
    votes = ops.window_votes(replace(layer, score_options=ops.ScoreOptions(scaling=LN2)))
    assert votes.dtype == torch.float32
    assert votes[0].tolist() == [close(VOTES), close(SECOND_HEAD)]
    both = [[64 / 180, 62 / 180, 64 / 180, 76 / 180]]
    assert ops.reduce_group(votes, 1, "mean")[0].tolist() == [close(both[0])]
    assert ops.reduce_group(votes, 1, "sum")[0].tolist() == [close([2 * x for x in both[0]])]
    best = [[78 / 180, 70 / 180, 78 / 180, 110 / 180]]
    assert ops.reduce_group(votes, 1, "max")[0].tolist() == [close(best[0])]
    assert torch.equal(ops.reduce_group(votes, 1, "none"), votes)


@pytest.mark.parametrize("impl", ["reference", "scan"])
@pytest.mark.parametrize(
    ("votes", "decay", "expected"),
    [
        ([8.0, 1.0, 3.0, 0.0, 0.0], 0.5, [8.0, 4.0, 3.0, 1.5, 0.75]),
        ([0.0, 0.0, 4.0], 0.5, [0.0, 0.0, 4.0]),  # nothing before it
        ([-4.0, -8.0, -1.0], 0.5, [-4.0, -2.0, -1.0]),
        ([float("-inf"), 2.0, float("-inf")], 0.5, [float("-inf"), 2.0, 1.0]),
        ([], 0.5, []),
    ],
)
def test_faded_votes_equal_the_worked_example(votes, decay, expected, impl):
    faded = ops.fade_votes(torch.tensor(votes).view(1, 1, -1), decay, impl=impl)
    assert faded[0, 0].tolist() == expected
    assert oracle.fade(votes, decay) == expected


@pytest.mark.parametrize("counts", [[1, 1], [5, 5], [17, 17], [3, 12], [30, 1]])
def test_selection_among_tied_scores_prefers_lower_positions(counts):
    scores = torch.randint(4, (2, 3, 17), generator=torch.Generator().manual_seed(0)).float()
    plain = [
        [sorted(sorted(range(17), key=lambda slot: -head[slot])[:count]) for head in row]
        for row, count in zip(scores, counts, strict=True)
    ]
    mask = ops.mask_best(scores, counts)
    assert [[head.nonzero()[:, 0].tolist() for head in row] for row in mask] == plain
    kept = [min(count, 17) for count in counts]
    filled = [[[-1] * (max(kept) - len(head)) + head for head in row] for row in plain]
    assert ops.kept_indices(mask).tolist() == filled
    assert ops.keep_best(scores, kept).tolist() == filled


def test_position_with_a_nan_score_is_kept():
    scores = torch.tensor([[[3.0, 1.0, float("nan"), 2.0]]])
    assert ops.keep_best(scores, [2]).tolist() == [[[0, 2]]]


def test_indices_of_rows_and_heads_that_keep_fewer_begin_with_minus_one():
    scores = torch.tensor([[[9.0, 1.0, 5.0, 7.0, 3.0]], [[99.0, 98.0, 97.0, 2.0, 1.0]]])
    kept = ops.keep_best(scores, [3, 1], torch.tensor([0, 3]))
    assert kept[:, 0].tolist() == [[0, 2, 3], [-1, -1, 3]]
    assert ops.keep_best(scores, [0, 0]).shape == (2, 1, 0)
    heads = ops.keep_best(scores.transpose(0, 1), [[3, 1]], torch.tensor([0]))
    assert heads[0].tolist() == [[0, 2, 3], [-1, -1, 0]]


FADING = {"pooling": "fading", "sink_tokens": 0}


@pytest.mark.parametrize(
    ("pooling", "budget", "expected"),
    [
        ({"kernel_size": 1}, 3, [3, 4, 5]),
        ({"kernel_size": 1}, 4, [1, 3, 4, 5]),
        ({"kernel_size": 3}, 3, [2, 4, 5]),  # pooled 7, 7, 11, 11: the lower of the tie
        ({"kernel_size": 3}, 5, [0, 2, 3, 4, 5]),
        ({"kernel_size": (0, 1)}, 4, [1, 3, 4, 5]),  # 5, 7, 7, 11: the vote before what it lifts
        ({"kernel_size": (0, 1)}, 5, [1, 2, 3, 4, 5]),
        ({"kernel_size": (1, 0)}, 4, [2, 3, 4, 5]),  # pooled 7, 7, 11, 11
        (FADING | {"decay": 0.5}, 5, [0, 1, 3, 4, 5]),  # 5, 7, 5, 11: of equal ones the lower
        (FADING | {"decay": 0.9}, 5, [1, 2, 3, 4, 5]),  # 5, 7, 6.3, 11
    ],
)
def test_selection_equals_the_worked_example(pooling, budget, expected):
    policy = SnapKV(budget, window_size=2, **pooling)
    assert policy.select(example()).keep_indices.tolist() == [[expected]]


# Two queries, two prefix positions on from the first each is lifted to half of the one before it.
#
#     position        0    1    2    3  |  4    5
#     query 4        .4    0   .2    0  | .4             of these .6 are on the prefix
#     faded          .4   .2   .2   .1                   .9 in all, so times 2/3
#     query 5        .1    0    0   .3  | .3   .3        .4
#     faded          .1  .05 .025   .3                   .475, so times 16/19
#
# With the first position a sink, which lifts nothing, query 4 has 0, .2, .1 instead of 0, .2, 0, so
# times 2/3, and query 5 has 0, 0, .3 as before.
BY_QUERY = [[0.4, 0.0, 0.2, 0.0, 0.4], [0.1, 0.0, 0.0, 0.3, 0.3, 0.3]]
LARGEST = {0: [4 / 15, 2 / 15, 2 / 15, 24 / 95], 1: [0.4, 0.0, 2 / 15, 0.3]}


@pytest.mark.parametrize("impl", ["reference", "blocked"])
@pytest.mark.parametrize("sinks", LARGEST)
def test_largest_votes_equal_the_worked_example(sinks, impl):
    layer = worked_prompt(BY_QUERY, 6)
    largest, summed = ops.largest_votes(
        layer,
        ops.Fading(0.5),
        prefix_tokens=4,
        sink_tokens=sinks,
        impl=impl,
    )
    assert largest[0, 0].tolist() == close(LARGEST[sinks])
    assert summed[0, 0].tolist() == close([0.5, 0.0, 0.2, 0.3])


def test_votes_below_the_mean_are_raised_almost_to_the_mean_in_their_order():
    """The mean of 4/15, 2/15, 2/15, 24/95 is 56/285; that of 0, 2/15, .3 without the sink 13/90."""
    policy = SnapKV(6, window_size=2, pooling="fading", decay=0.5, window_reduce="max")
    for sinks, mean in ((0, 56 / 285), (1, 13 / 90)):
        scores = replace(policy, sink_tokens=sinks).score(worked_prompt(BY_QUERY, 6))[0, 0]
        near = [max(vote, mean + (vote - mean) / 1024) for vote in LARGEST[sinks]]
        assert scores.tolist() == close(near)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_gather_copies_only_the_kept_positions(heads):
    # More tokens than any memory holds: a copy of the whole cannot even be allocated.
    tokens = 2**45
    states = torch.ones(1).expand(1, 2, tokens, 8)
    kept = ops.gather_tokens(states, torch.tensor([0, tokens - 1]).expand(1, heads, -1))
    assert torch.equal(kept, torch.ones(1, max(heads, 2), 2, 8))
