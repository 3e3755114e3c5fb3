"""The lost vote mass in plain words."""

import pytest

from snapkv.cache.lost_votes import DOUBTFUL_BELOW, SAFE_BELOW, LostVotes, word_for


def report(**values):
    return {"kept_tokens": 256, "seen_tokens": 4096, **values}


@pytest.mark.parametrize(
    ("lost", "word"),
    [
        (0.0, "safe"),
        (SAFE_BELOW - 0.001, "safe"),
        (SAFE_BELOW, "doubtful"),
        (DOUBTFUL_BELOW - 0.001, "doubtful"),
        (DOUBTFUL_BELOW, "lost"),
        (1.0, "lost"),
        (float("nan"), "lost"),
    ],
)
def test_every_share_has_a_word_and_the_borders_belong_to_the_worse_one(lost, word):
    assert word_for(lost) == word


def test_a_report_without_votes_says_nothing():
    for votes in (LostVotes.of(report()), LostVotes.of(report(lost_votes=None))):
        assert str(votes) == "-"
        assert votes.word is None
        assert not votes.calls_for_more


def test_a_report_with_votes_says_the_share_and_the_word():
    votes = LostVotes.of(report(lost_votes=0.072, lost_votes_highest=0.4))
    assert str(votes) == "7 % (safe)"
    assert votes.highest == 0.4
    assert not votes.calls_for_more
    assert LostVotes.of(report(lost_votes=0.1)).calls_for_more
    assert str(LostVotes.of(report(lost_votes=0.31))) == "31 % (lost)"


@pytest.mark.parametrize("lost", [None, 0.0, 0.5])
def test_where_all_is_held_nothing_was_dropped(lost):
    votes = LostVotes.of(report(kept_tokens=4096, lost_votes=lost))
    assert str(votes) == "nothing was dropped"
    assert votes.word == "safe"
