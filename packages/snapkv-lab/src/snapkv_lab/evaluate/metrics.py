"""Scores of answers, by the definitions that LongBench published (Bai et al., 2023).

Every metric takes an answer and one right answer, and returns 0 to 1. The quirks of the published
code are kept, because scores are compared with published ones.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from difflib import SequenceMatcher
from typing import Literal

Metric = Callable[[str, str], float]

CodeSimilarity = Literal["difflib", "levenshtein"]
"""How lines of code are compared, see `code_similarity`."""

PARAGRAPH = r"Paragraph (\d+)"
"""The pattern of a right answer in the retrieval task."""


def best_score(metric: Metric, prediction: str, references: Iterable[str]) -> float:
    """Return the best score of the prediction over all references.

    The score is 0 without references.
    """
    return max((metric(prediction, reference) for reference in references), default=0.0)


def first_line(prediction: str) -> str:
    """Remove the line breaks at the beginning of an answer, and return the text up to the next line
    break. A model may continue with another example after it.
    """
    return prediction.lstrip("\n").split("\n")[0]


def normalize_answer(text: str) -> str:
    """Normalize a text as SQuAD does, so that answers can be compared: lower case, without
    punctuation and English articles, with single spaces between words. The result may be empty.
    """
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def qa_f1(prediction: str, reference: str) -> float:
    """Return the F1 score of the words of two answers, counted as often as they occur.

    Both are normalized by `normalize_answer`. The score is 0 if they share no word.
    """
    predicted, right = (normalize_answer(text).split() for text in (prediction, reference))
    same = (Counter(predicted) & Counter(right)).total()
    if same == 0:
        return 0.0
    precision, recall = same / len(predicted), same / len(right)
    return 2 * precision * recall / (precision + recall)


def classification_score(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """Return 1 divided by the number of classes that the answer names, or 0 if the right one is
    missing.

    A class whose name is part of the right class's name is not counted. The published code removes
    it from the list that it iterates over, so the next class is never checked. Published scores
    depend on this, so it is kept.

    Args:
        prediction: the answer; it names a class if it contains the name.
        reference: the name of the right class.
        classes: the names of all classes.
    """
    named = [name for name in classes if name in prediction]
    for name in named:
        if name in reference and name != reference:
            named.remove(name)
    return 1.0 / len(named) if reference in named else 0.0


def count_score(prediction: str, reference: str) -> float:
    """Return the fraction of the numbers in the answer that are equal to the reference.

    The fraction is 0 if the answer has no number.
    """
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval_score(prediction: str, reference: str) -> float:
    """Return the fraction of the numbers in the answer that match the right paragraph.

    The reference is a text like "Paragraph 12". The fraction is 0 if the answer has no number, or
    the reference has another form.
    """
    paragraph = re.search(PARAGRAPH, reference)
    return count_score(prediction, paragraph[1]) if paragraph else 0.0


def code_similarity(prediction: str, reference: str, backend: CodeSimilarity = "difflib") -> float:
    """Return the similarity of the first line of code in the answer and the right line.

    It is a number from 0 to 1 in steps of 0.01, and 0 if one of the two is empty. A line with a
    backtick, "#" or "//" does not count as code. Published scores were computed with `fuzzywuzzy`,
    which has two ways of counting. "difflib" gives the numbers that it gives as LongBench's
    requirements install it. "levenshtein" gives the numbers with python-Levenshtein installed,
    which `thefuzz` and `rapidfuzz` give too. The two differ on many lines.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not re.search("`|#|//", line)), "")
    if line == reference:
        return 1.0
    if not line or not reference:
        return 0.0
    if backend == "difflib":
        ratio = SequenceMatcher(None, line, reference).ratio()
    else:
        ratio = 2 * len(common_subsequence(line, reference)) / (len(line) + len(reference))
    return round(100 * ratio) / 100


def rouge_l(prediction: str, reference: str) -> float:
    """Return the summary-level ROUGE-L score of the prediction.

    It is computed as by `rouge` 1.0.1, which published scores used. A text is split into sentences
    at every full stop, and a sentence into words at white space. Every pair of sentences has a
    longest common subsequence. The words of all of these form one set, and precision and recall are
    its size divided by the number of different words in either text. Other packages (`rouge-score`)
    count differently. `rouge` itself fails on sentences of about a thousand words, which LongBench
    scores as 0; here such a pair gets the score of the definition. The score is 0 if a text has no
    sentence.
    """
    predicted, right = _sentences(prediction), _sentences(reference)
    if not predicted or not right:
        return 0.0
    common = {
        word
        for reference_words in right
        for words in predicted
        for word in common_subsequence(reference_words, words)
    }
    precision = len(common) / len(set().union(*predicted))
    recall = len(common) / len(set().union(*right))
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def _sentences(text: str) -> list[list[str]]:
    """Return a list of the words in each sentence of the text, which full stops end.

    Empty sentences are left out. A sentence of only white space has one empty word.
    """
    return [part.split() or [""] for part in text.split(".") if part]


def common_subsequence(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Return the longest common subsequence of two lists, in reverse order.

    If several are equally long, it is the one that `rouge` finds: starting at the ends, an item of
    `first` is skipped only if that loses nothing that skipping an item of `second` would keep.
    """
    lengths = [[0] * (len(second) + 1)]  # one for every pair of prefixes
    for item in first:
        above, row = lengths[-1], [0]
        for j, other in enumerate(second):
            row.append(above[j] + 1 if item == other else max(above[j + 1], row[j]))
        lengths.append(row)
    common = []
    i, j = len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            common.append(first[i])
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return common
