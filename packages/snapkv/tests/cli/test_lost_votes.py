"""Lost votes in plain words."""

import pytest
import torch

from snapkv import CompressedCache, SnapKV
from snapkv.cli.lost_votes import DOUBTFUL_BELOW, SAFE_BELOW, LostInWords, word_for
from tests.families import random_ids, tiny_model


def report(**values):
    return {"kept_tokens": 256, "seen_tokens": 1024, **values}


@pytest.mark.parametrize(
    ("peak", "word"),
    [
        (0.0, "safe"),
        (SAFE_BELOW - 0.0001, "safe"),
        (SAFE_BELOW, "doubtful"),
        (DOUBTFUL_BELOW - 0.0001, "doubtful"),
        (DOUBTFUL_BELOW, "lost"),
        (1.0, "lost"),
        (float("nan"), "lost"),
    ],
)
def test_every_peak_has_a_word_and_the_borders_belong_to_the_worse_one(peak, word):
    assert word_for(peak, 1024) == word


def test_votes_on_a_longer_prompt_weigh_more():
    assert word_for(SAFE_BELOW / 2, 1000) == word_for(SAFE_BELOW / 8, 7 * 1024) == "safe"
    assert word_for(SAFE_BELOW / 2, 2 * 1024) == word_for(SAFE_BELOW / 8, 8 * 1024) == "doubtful"
    assert word_for(DOUBTFUL_BELOW / 8, 8 * 1024) == "lost"


def test_a_report_without_votes_says_nothing():
    for votes in (LostInWords.of(report()), LostInWords.of(report(lost_votes=None))):
        assert str(votes) == "-"
        assert votes.word is None
        assert not votes.calls_for_more


def test_a_report_with_votes_says_the_share_and_the_word():
    layers = [{"lost_votes": 0.01}, {"kind": "sliding"}, {"lost_votes": 0.4}]
    votes = LostInWords.of(report(lost_votes=0.072, lost_vote_peak=0.0007, layers=layers))
    assert str(votes) == "7 % (safe)"
    assert votes.highest == 0.4
    assert not votes.calls_for_more
    doubtful = LostInWords.of(report(lost_votes=0.1, lost_vote_peak=0.004))
    assert doubtful.calls_for_more
    lost = LostInWords.of(report(lost_votes=0.05, lost_vote_peak=0.02))
    assert str(lost) == "5 % (lost)"


@pytest.mark.parametrize("lost", [None, 0.0, 0.5])
def test_where_all_is_held_nothing_was_dropped(lost):
    votes = LostInWords.of(report(kept_tokens=1024, lost_votes=lost))
    assert str(votes) == "nothing was dropped"
    assert votes.word == "safe"


@torch.no_grad()
def test_the_word_is_that_of_the_prompt_however_much_follows():
    model = tiny_model("llama")
    cache = CompressedCache(model, SnapKV(24, window_size=8))
    model(random_ids(1, 60), past_key_values=cache)
    behind_the_prompt = LostInWords.of(cache.report())
    for tokens in (1, 140):
        model(random_ids(1, tokens), past_key_values=cache)
        assert LostInWords.of(cache.report()) == behind_the_prompt
    assert behind_the_prompt.tokens == 60
