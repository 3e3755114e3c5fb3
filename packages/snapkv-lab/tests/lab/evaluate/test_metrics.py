"""Scores are the published ones to 1e-9: on real pairs of texts, and on examples worked by hand."""

import argparse
import inspect
import itertools
import json
import math
import random

import pytest
from rouge import Rouge

from snapkv.packages import package_file
from snapkv_lab.evaluate import metrics
from snapkv_lab.evaluate.metrics import rouge_l
from tests.lab.evaluate import longbench_oracle as oracle

DATA = ("data", "synthetic", "json")


@pytest.fixture(scope="module")
def articles():
    """Paragraphs of Wikipedia, by article."""
    path = package_file("long_context_eval", *DATA, "squad.json")
    data = json.loads(path.read_text("utf-8"))["data"]
    return [[paragraph["context"] for paragraph in article["paragraphs"]] for article in data]


@pytest.fixture(scope="module")
def answers():
    """Right answers of SQuAD with the sentence each stands in, as a model might give it."""
    path = package_file("long_context_eval", *DATA, "squad.json")
    pairs = []
    for article in json.loads(path.read_text("utf-8"))["data"]:
        for paragraph in article["paragraphs"][::3]:
            for question in paragraph["qas"]:
                for answer in question["answers"][:2]:
                    start = answer["answer_start"]
                    around = paragraph["context"][max(start - 40, 0) : start + 60]
                    pairs.append((around, answer["text"]))
    return pairs


def package_rouge_l(prediction, reference):
    return Rouge().get_scores([prediction], [reference], avg=True)["rouge-l"]["f"]


def test_rouge_l_is_the_package_s_on_real_paragraphs(articles):
    pairs = [pair for texts in articles for pair in itertools.pairwise(texts[:3])]
    assert len(pairs) >= 60
    for prediction, reference in pairs:
        wanted = package_rouge_l(prediction, reference)
        assert wanted > 0
        assert rouge_l(prediction, reference) == pytest.approx(wanted, abs=1e-9)


def test_rouge_l_is_the_package_s_where_subsequences_are_ambiguous():
    """Few words, many repeats: which of the equally long subsequences is taken decides."""
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
def test_a_text_without_a_sentence_has_no_rouge(text):
    """The package raises, and LongBench counts that as 0."""
    with pytest.raises(ValueError, match="Hypothesis is empty"):
        package_rouge_l(text, "a b")
    assert rouge_l(text, "a b") == rouge_l("a b", text) == 0.0


def test_rouge_l_of_long_sentences_has_a_score_where_the_package_fails():
    """500 words, all found among 1,000: precision 1/2, recall 1."""
    words = [f"w{number}" for number in range(500)]
    reference, prediction = " ".join(words), " ".join([*words, *(f"x{word}" for word in words)])
    with pytest.raises(RecursionError):
        package_rouge_l(prediction, reference)
    assert rouge_l(prediction, reference) == pytest.approx(2 / 3, abs=1e-6)


def test_f1_is_the_published_one_on_real_answers(answers):
    assert len(answers) > 2000
    for prediction, reference in answers:
        wanted = oracle.qa_f1(prediction, reference)
        assert metrics.qa_f1(prediction, reference) == pytest.approx(wanted, abs=1e-9)


CLASSES = ("Food", "Food type", "Date", "Number of something", "Number", "Other number")


def test_classification_is_the_published_one():
    texts = [f"Type: {name}" for name in CLASSES]
    texts += [f"{a} or {b}" for a, b in itertools.permutations(CLASSES, 2)]
    texts += [", ".join(names) for names in itertools.combinations(CLASSES, 3)]
    for prediction, truth in itertools.product(texts, CLASSES):
        wanted = oracle.classification(prediction, truth, CLASSES)
        assert metrics.classification(prediction, truth, CLASSES) == pytest.approx(wanted, abs=1e-9)


def test_classification_skips_what_stands_behind_a_removed_class():
    """Both parts of the right class should go; the second is stepped over and halves the score."""
    classes = ("Number", "Number of", "Number of something")
    assert metrics.classification("Number of something", "Number of something", classes) == 0.5
    parted = ("Number", "Date", "Number of", "Number of something")
    assert metrics.classification("Number of something", "Number of something", parted) == 0.5


def numbered_answers():
    for shown in ("3", "Paragraph 3", "3, 4 or 33", "The answer is: 3\n\n3 3 7", "none", "", "03"):
        for right in (3, 4, 33, 30):
            yield shown, right
    draw = random.Random(1)
    for _ in range(60):
        numbers = draw.choices(range(1, 12), k=draw.randint(0, 5))
        yield "Paragraph " + ", ".join(map(str, numbers)), draw.randint(1, 11)


def test_count_and_retrieval_are_the_published_ones():
    for prediction, right in numbered_answers():
        wanted = oracle.numbers_that_match(prediction, right)
        assert metrics.count(prediction, str(right)) == pytest.approx(wanted, abs=1e-9)
        paragraph = f"Paragraph {right}"
        wanted = oracle.retrieval(prediction, paragraph)
        assert metrics.retrieval(prediction, paragraph) == pytest.approx(wanted, abs=1e-9)


def code_pairs():
    """Lines of Python's own source with the line after them, as a wrong completion."""
    lines = [line for line in inspect.getsource(argparse).splitlines() if line.strip()]
    return list(itertools.pairwise(lines))[:1500:3]


def test_code_similarity_is_fuzzywuzzy_s_without_levenshtein():
    pairs = code_pairs()
    assert len(pairs) == 500
    for prediction, reference in pairs:
        wanted = oracle.code_similarity(prediction, reference)
        assert metrics.code_similarity(prediction, reference) == pytest.approx(wanted, abs=1e-9)


def test_the_two_code_similarities_are_different_numbers():
    """difflib finds "bc" and then nothing; a subsequence of both is "bc" or "ad" and more."""
    assert metrics.code_similarity("adbc", "bcad") == 0.5
    pairs = code_pairs()
    both = [
        (metrics.code_similarity(*pair), metrics.code_similarity(*pair, "levenshtein"))
        for pair in pairs
    ]
    assert all(plain <= subsequence for plain, subsequence in both)
    assert sum(plain != subsequence for plain, subsequence in both) > len(pairs) / 5


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        ("# set x\nx = 1", "x = 1", 1.0),
        ("// only a comment", "x = 1", 0.0),
        ("   \nx = 1", "x = 1", 0.5),
    ],
)
def test_the_first_line_of_code_counts(prediction, reference, score):
    """A blank line inside counts as code, as published: 2 of its blanks are in "x = 1"."""
    assert metrics.code_similarity(prediction, reference) == score
    assert oracle.code_similarity(prediction, reference) == score


# BLEU
@pytest.mark.parametrize(
    ("said", "wanted", "expected"),
    [
        ("a b c d e", "a b c d f", 0.2**0.25),
        ("a a a a a", "a a a a", 0.2**0.25),
        ("a b c d", "a b c d e", math.exp(-1 / 4)),
        ("a b c d", "d c b a", 0.0),
        ("", "a b c d", 0.0),
    ],
)
def test_bleu_by_hand(said, wanted, expected):
    assert metrics.bleu(said, wanted) == pytest.approx(expected, abs=1e-12)
