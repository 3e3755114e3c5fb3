"""How right an answer is, by the definitions that LongBench published (Bai et al., 2023).

Every metric takes an answer and one right answer and gives 0 to 1. Their quirks are kept, since
scores are compared with published ones.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from difflib import SequenceMatcher
from typing import Literal

Metric = Callable[[str, str], float]

CodeSimilarity = Literal["difflib", "levenshtein"]
"""What compares lines of code, see `code_similarity`."""

PARAGRAPH = r"Paragraph (\d+)"
"""What a right answer of a retrieval looks like."""


def best_score(metric: Metric, prediction: str, references: Iterable[str]) -> float:
    """The score against the reference that the answer is nearest to; 0 without references."""
    return max((metric(prediction, reference) for reference in references), default=0.0)


def first_line(prediction: str) -> str:
    """The first line that is not empty; after it a model goes on with another example."""
    return prediction.lstrip("\n").split("\n")[0]


def normalize_answer(text: str) -> str:
    """As SQuAD compares answers: lower case, no punctuation, no articles, single spaces."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def qa_f1(prediction: str, reference: str) -> float:
    """F1 of the words of both answers, each as often as it occurs."""
    said, wanted = (normalize_answer(text).split() for text in (prediction, reference))
    same = (Counter(said) & Counter(wanted)).total()
    if same == 0:
        return 0.0
    precision, recall = same / len(said), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def classification_score(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 over the number of classes that the answer names, if the right one is among them.

    A class whose name is part of the right one's does not count as named. The published code takes
    it out of the list that it is walking through, so the one after it is never looked at; scores
    depend on it, and so does this.
    """
    named = [name for name in classes if name in prediction]
    for name in named:
        if name in reference and name != reference:
            named.remove(name)
    return 1.0 / len(named) if reference in named else 0.0


def count_score(prediction: str, reference: str) -> float:
    """How many of the numbers in the answer are the right one."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval_score(prediction: str, reference: str) -> float:
    """How many of the numbers in the answer are those of a reference such as "Paragraph 12"."""
    paragraph = re.search(PARAGRAPH, reference)
    return count_score(prediction, paragraph[1]) if paragraph else 0.0


def code_similarity(prediction: str, reference: str, backend: CodeSimilarity = "difflib") -> float:
    """Likeness of the answer's first line of code to the right one, in whole percents.

    A line with a backtick, "#" or "//" is not taken for code. Published scores were made by
    `fuzzywuzzy`, which counts in two ways: "difflib" is what it gives as LongBench's requirements
    install it, "levenshtein" what it gives where python-Levenshtein is installed too, as do
    `thefuzz` and `rapidfuzz`. They differ on many lines.
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
    """Summary-level ROUGE-L as `rouge` 1.0.1 counts it, which published scores were made with.

    A text is cut into sentences at every full stop, a sentence into words at white space. Every
    pair of sentences has a longest common subsequence; the words of all of them make up one set,
    and precision and recall are its size over the number of different words of either text. Other
    packages (`rouge-score`) count otherwise and give other numbers. `rouge` itself fails on
    sentences of about a thousand words, which LongBench counts as 0; here such a pair gets the
    score that the definition gives it. 0 where a text has no sentence.
    """
    said, wanted = _sentences(prediction), _sentences(reference)
    if not said or not wanted:
        return 0.0
    common = {
        word
        for reference_words in wanted
        for words in said
        for word in common_subsequence(reference_words, words)
    }
    precision = len(common) / len(set().union(*said))
    recall = len(common) / len(set().union(*wanted))
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def _sentences(text: str) -> list[list[str]]:
    """The words of every sentence; a sentence of white space alone has one word, the empty one."""
    return [part.split() or [""] for part in text.split(".") if part]


def common_subsequence(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """A longest common subsequence, last item first.

    Of several that are equally long, the one that `rouge` finds: from the ends, an item of `first`
    is left out only where that loses nothing that leaving out one of `second` would keep.
    """
    lengths = [[0] * (len(second) + 1)]  # of every pair of prefixes
    for item in first:
        above, row = lengths[-1], [0]
        for j, other in enumerate(second):
            row.append(above[j] + 1 if item == other else max(above[j + 1], row[j]))
        lengths.append(row)
    found = []
    i, j = len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            found.append(first[i])
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found
