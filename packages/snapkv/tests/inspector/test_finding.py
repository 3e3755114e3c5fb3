"""The opening sentence, by hand."""

from dataclasses import replace

import pytest
import torch

from snapkv import SnapKV
from snapkv.inspector.leave_out import Span, needed_spans
from snapkv.inspector.scores import KeptOf, SeenLayer, telling_head
from snapkv.inspector.words import sentence
from snapkv.ops import ScoreOptions
from snapkv.policies import PromptLayer

SPANS = [
    Span(start=0, stop=2, loss=0.1, changed=False),
    Span(start=2, stop=4, loss=0.5, changed=True),
    Span(start=4, stop=8, loss=2.0, changed=True),
]


def seen(kept, votes=None, scores=None):
    kept = torch.tensor(kept).bool()
    states = torch.zeros(1, len(kept), kept.shape[1], 1)
    return SeenLayer(
        policy=SnapKV(4, window_size=1),
        states=PromptLayer(
            queries=states,
            keys=states,
            values=states,
            score_options=ScoreOptions(scaling=1.0),
            layer_idx=0,
        ),
        kept=kept,
        votes=None if votes is None else torch.tensor(votes),
        scores=None if scores is None else torch.tensor(scores),
        cuts=None,
    )


def kept_of(share):
    return KeptOf(share=share, heads=1, of_heads=2)


def test_the_part_that_is_missed_most_comes_first_and_only_what_changes_the_answer():
    apart = [SPANS[1], Span(start=4, stop=5, loss=9.0, changed=False), replace(SPANS[2], start=5)]
    assert needed_spans([SPANS[0], *apart]) == [apart[2], apart[0]]
    assert needed_spans([]) == []


def test_neighbours_are_one_part_that_is_missed_as_much_as_either():
    more = Span(start=8, stop=9, loss=1.0, changed=True)
    assert needed_spans([*SPANS, more]) == [Span(start=2, stop=9, loss=2.0, changed=True)]


@pytest.mark.parametrize(
    ("places", "share", "held", "expected"),
    [
        (["§ 9.11"], 1.0, 0.08, "The answer needs § 9.11; all of it was kept, in 8.0%"),
        (["§ 9.11"], 0.0, 0.25, "The answer needs § 9.11; none of it was kept, in 25%"),
        (["§ 1", "§ 2"], 0.999, 0.999, "The answer needs § 1 and § 2; 99% of it was kept, in 99%"),
        (["§ 1", "§ 2", "§ 1"], 0.5, 1.0, "needs § 1 and § 2; 50% of it was kept, in 100%"),
        (["a", "b", "c"], 0.0001, 0.5, "needs a, b and 1 more place; 0.1% of it was kept"),
        (["a", "b", "c", "d"], 1.0, 0.5, "needs a, b and 2 more places; all of it"),
    ],
)
def test_the_sentence(places, share, held, expected):
    assert expected in sentence(SPANS, places, kept_of(share), held)


def test_what_is_not_known_is_not_claimed():
    assert sentence([], [], None, 0.08).startswith("What the answer needs was not looked at;")
    assert sentence(SPANS[:1], [], None, 0.08).startswith("No part of the prompt changes the")


def test_how_much_was_kept_goes_by_the_best_head_of_every_part():
    """Head 0 keeps the first part and half of the second, head 1 a quarter of the second."""
    layer = seen([[1, 0, 1, 1, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0, 0, 1]])
    other = seen([[0] * 8])
    found = KeptOf.parts([layer, other], SPANS[1:])
    assert found == KeptOf(share=(2 + 2) / 6, heads=5 / 6, of_heads=3)
    assert KeptOf.parts([layer], []) is None


def test_heads_that_share_a_part_do_not_keep_all_of_it():
    halves = seen([[0] * 4 + [1, 1, 0, 0], [0] * 4 + [0, 0, 1, 1]])
    assert KeptOf.parts([halves], SPANS[2:]).share == 0.5


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
