"""BLEU by hand, beside a count run by run, and beside the smoothed one of nltk at the threshold."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

from snapkv_lab.evaluate.metrics import bleu

TEXTS = st.lists(st.sampled_from("abcde"), max_size=12)


@pytest.mark.parametrize(
    ("said", "wanted", "expected"),
    [
        ("a b c d e", "a b c d e", 1.0),
        # Precisions 4/5, 3/4, 2/3 and 1/2.
        ("a b c d e", "a b c d f", 0.2**0.25),
        # The same: of five times "a" four count.
        ("a a a a a", "a a a a", 0.2**0.25),
        # Nothing is wrong, and one of five words is missing.
        ("a b c d", "a b c d e", math.exp(-1 / 4)),
        ("a b c", "a b c", 0.0),
        ("a b c d", "d c b a", 0.0),
        ("", "a b c d", 0.0),
        ("a b c d", "", 0.0),
    ],
)
def test_by_hand(said, wanted, expected):
    assert bleu(said, wanted) == pytest.approx(expected, abs=1e-12)


def slow_bleu(said, wanted):
    """Every run of the answer takes one of the right text's away, where there is one left."""
    product = 1.0
    for size in (1, 2, 3, 4):
        own = [said[i : i + size] for i in range(len(said) - size + 1)]
        left = [wanted[i : i + size] for i in range(len(wanted) - size + 1)]
        same = 0
        for run in own:
            if run in left:
                left.remove(run)
                same += 1
        if not own:
            return 0.0
        product *= same / len(own)
    penalty = 1.0 if len(said) > len(wanted) else math.exp(1 - len(wanted) / len(said))
    return penalty * product**0.25


@given(said=TEXTS, wanted=TEXTS)
def test_it_is_what_counting_run_by_run_gives(said, wanted):
    assert bleu(*map(" ".join, (said, wanted))) == pytest.approx(slow_bleu(said, wanted), abs=1e-9)


@given(said=TEXTS, wanted=TEXTS.filter(lambda words: len(words) > 3))
def test_smoothing_changes_no_verdict_at_the_threshold(said, wanted):
    """RepoQA takes nltk's fourth smoothing."""
    smoothed = sentence_bleu([wanted], said, smoothing_function=SmoothingFunction().method4)
    own = bleu(*map(" ".join, (said, wanted)))
    assert (own >= 0.8) == (smoothed >= 0.8)
    if own:
        assert own == pytest.approx(smoothed, abs=1e-9)
