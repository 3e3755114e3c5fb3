"""Scores equal the published ones to 1e-9, on drawn pairs of texts and on examples by hand."""

import random

import pytest
from rouge import Rouge

from snapkv_lab.evaluate import metrics
from snapkv_lab.evaluate.metrics import rouge_l


def package_rouge_l(prediction, reference):
    return Rouge().get_scores([prediction], [reference], avg=True)["rouge-l"]["f"]


def test_rouge_l_equals_the_rouge_package_for_ambiguous_subsequences():
    """With few words and many repeats, the score depends on which longest subsequence is found."""
    draw = random.Random(0)
    for _ in range(200):
        texts = [
            ". ".join(
                " ".join(draw.choices("abcdef", k=draw.randint(1, 9)))
                for _ in range(draw.randint(1, 4))
            )
            for _ in range(2)
        ]
        assert rouge_l(*texts) == pytest.approx(package_rouge_l(*texts), abs=1e-9), texts


@pytest.mark.parametrize("text", ["", "..."])
def test_rouge_l_of_a_text_without_sentences_is_zero(text):
    """The package raises an error, which LongBench counts as 0."""
    with pytest.raises(ValueError, match="Hypothesis is empty"):
        package_rouge_l(text, "a b")
    assert rouge_l(text, "a b") == rouge_l("a b", text) == 0.0


def test_rouge_l_of_long_sentences_has_a_score():
    """500 words, all found among 1,000: precision 1/2, recall 1. The package fails by recursion."""
    words = [f"w{number}" for number in range(500)]
    reference, prediction = " ".join(words), " ".join([*words, *(f"x{word}" for word in words)])
    assert rouge_l(prediction, reference) == pytest.approx(2 / 3, abs=1e-6)


def test_classification_skips_the_class_after_a_removed_one_as_published():
    """Both parts of the right class should be removed, but the second is skipped and halves the
    score.
    """
    classes = ("Number", "Number of", "Number of something")
    assert metrics.classification_score(classes[-1], classes[-1], classes) == 0.5
    parted = ("Number", "Date", "Number of", "Number of something")
    assert metrics.classification_score("Number of something", "Number of something", parted) == 0.5


def code(said, wanted):
    return metrics.code_similarity(said, wanted)


def subsequence(said, wanted):
    return metrics.code_similarity(said, wanted, "levenshtein")


@pytest.mark.parametrize(
    ("metric", "said", "wanted", "score"),
    [
        (metrics.qa_f1, "Under the blue stone, and more", "the blue stone", 2 * 2 / 7),
        (metrics.qa_f1, "A stone! a stone", "stone", 2 / 3),  # each as often as it occurs
        (metrics.qa_f1, "The", "stone", 0.0),
        (metrics.count_score, "3, 4 or 33", "3", 1 / 3),
        (metrics.count_score, "03", "3", 0.0),
        (metrics.count_score, "none", "3", 0.0),
        (metrics.retrieval_score, "Paragraph 3, 3 3 7", "Paragraph 3", 3 / 4),
        (code, "adbc", "bcad", 0.5),  # "bc", and then nothing
        (subsequence, "abcx", "axbycz", 0.6),
        (code, "axbc", "abxc", 0.75),
        (code, "# set x\nx = 1", "x = 1", 1.0),
        (code, "```\nx = 1", "x = 1", 1.0),
        (code, "// only a comment", "x = 1", 0.0),
        (code, "   \nx = 1", "x = 1", 0.5),  # a blank line counts, and 2 of its blanks are right
    ],
)
def test_metrics_equal_scores_computed_by_hand(metric, said, wanted, score):
    assert metric(said, wanted) == pytest.approx(score, abs=1e-9)


def test_answer_counts_by_the_reference_that_it_fits_best():
    references = ("red", "blue stone", "blue")
    assert metrics.best_score(metrics.qa_f1, "The blue stone.", references) == 1
    assert metrics.best_score(metrics.qa_f1, "The blue stone.", ()) == 0
