"""How a method rated and kept a prompt, by hand."""

import pytest
import torch

from snapkv import SnapKV
from snapkv.inspector.leave_out import Span
from snapkv.inspector.scores import KeptOf, SeenLayer, kept_mask, rating, telling_head
from snapkv.ops import ScoreOptions
from snapkv.policies import PromptLayer

SPANS = [
    Span(start=2, stop=4, loss=0.5, changed=True),
    Span(start=4, stop=8, loss=2.0, changed=True),
]


def layer(keys):
    """One query head that attends by the size of the keys."""
    keys = torch.tensor(keys).view(1, 1, -1, 1)
    return PromptLayer(
        queries=torch.ones(1, 1, 1, 1),
        keys=keys,
        values=keys,
        score_options=ScoreOptions(scaling=1.0),
        layer_idx=0,
    )


def seen(kept, votes=None, scores=None):
    return SeenLayer(
        policy=SnapKV(4, window_size=1),
        states=layer([0.0] * len(kept[0])),
        kept=torch.tensor(kept).bool(),
        votes=None if votes is None else torch.tensor(votes),
        scores=None if scores is None else torch.tensor(scores),
        cuts=None,
    )


def test_how_much_was_kept_goes_by_the_best_head_of_every_part():
    """Head 0 keeps the first part and half of the second, head 1 a quarter of the second."""
    layer = seen([[1, 0, 1, 1, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0, 0, 1]])
    other = seen([[0] * 8])
    found = KeptOf.parts([layer, other], SPANS)
    assert found == KeptOf(share=(2 + 2) / 6, heads=5 / 6, of_heads=3)
    assert KeptOf.parts([layer], []) is None


def test_heads_that_share_a_part_do_not_keep_all_of_it():
    halves = seen([[0] * 4 + [1, 1, 0, 0], [0] * 4 + [0, 0, 1, 1]])
    assert KeptOf.parts([halves], SPANS[1:]).share == 0.5


def test_the_most_telling_head_gives_the_source_the_largest_part_of_its_votes():
    source = torch.tensor([0, 1, 1, 0]).bool()
    quiet = seen([[1, 1, 1, 1]] * 2, scores=[[9.0, 0.5, 0.5], [0.0, 0.0, 0.0]])
    loud = seen(
        [[1, 1, 1, 1]] * 2, votes=[[1.0, 0.0, 0.0], [1.0, 1.0, 2.0]], scores=[[1.0] * 3] * 2
    )
    assert telling_head([quiet, loud], source) == (1, 1, 0.75)
    assert telling_head([quiet], source) == (0, 0, pytest.approx(0.1))


def test_no_head_tells_where_none_votes_for_the_source_or_scores_are_no_votes():
    source = torch.tensor([0, 1]).bool()
    assert telling_head([seen([[1, 1]])], source) is None
    assert telling_head([seen([[1, 1]], scores=[[-1.0, 2.0]])], source) is None
    assert telling_head([seen([[1, 1]], scores=[[1.0, 0.0]])], source) is None


@pytest.mark.parametrize(
    ("pooling", "lifted"),
    [
        ({"pooling": "fading", "decay": 0.5, "sink_tokens": 0}, (0, 1, 1, 1)),
        ({"kernel_size": (0, 2)}, (0, 1, 1, 1)),
        ({"kernel_size": (1, 0)}, (1, 1, 2, 3)),
        ({"kernel_size": 1}, (0, 1, 2, 3)),
    ],
    ids=str,
)
def test_a_rating_shows_votes_and_what_they_lift(pooling, lifted):
    """The query attends to the second key most; fading, what it lifts is a half and a quarter."""
    states = layer([0.0, 5.0, 1.0, 0.0, 0.0])
    policy = SnapKV(3, window_size=1, **pooling)
    selection = policy.select(states)
    rated = rating(policy, states, selection, kept_mask(selection, states))
    votes = torch.softmax(states.keys.flatten(), 0)[:4]
    expected = votes[list(lifted)]
    if policy.pooling == "fading":
        expected = expected * torch.tensor([1.0, 1.0, 0.5, 0.25])
    torch.testing.assert_close(rated.scores[0], expected)
    if policy.kernel_size == 1:  # nothing was pooled
        assert rated.votes is None
    else:
        torch.testing.assert_close(rated.votes[0], votes)


def test_a_rating_by_hand():
    """One head, four prefix positions, window 1; the query attends to the second key most."""
    states = layer([0.0, 3.0, 1.0, 0.0, 0.0])
    policy = SnapKV(3, window_size=1, kernel_size=3)
    selection = policy.select(states)
    kept = kept_mask(selection, states)
    assert kept[0].tolist() == [True, True, False, False, True]
    rated = rating(policy, states, selection, kept)
    votes = torch.softmax(states.keys.flatten(), 0)[:4]
    torch.testing.assert_close(rated.votes[0], votes)
    torch.testing.assert_close(rated.scores[0], torch.stack([votes[1]] * 3 + [votes[2]]))
    assert rated.cuts.tolist() == pytest.approx([votes[1].item()])


def test_nothing_dropped_is_everything_kept():
    assert kept_mask(None, layer([0.0] * 3)).tolist() == [[True] * 3]
