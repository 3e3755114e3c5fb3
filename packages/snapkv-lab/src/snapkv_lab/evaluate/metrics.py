"""How right an answer is, by the definitions that LongBench published (Bai et al., 2023).

Every metric takes an answer and one right answer and gives 0 to 1. Their quirks are kept, since
scores are compared with published ones. `snapkv_lab.evaluate.rouge` has ROUGE-L.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from difflib import SequenceMatcher
from typing import Literal

from snapkv_lab.evaluate.rouge import common_subsequence

Metric = Callable[[str, str], float]

CodeSimilarity = Literal["difflib", "levenshtein"]
"""What compares lines of code, see `code_similarity`."""

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def best(metric: Metric, prediction: str, references: Iterable[str]) -> float:
    """The score against the reference that the answer is nearest to; 0 without references."""
    return max((metric(prediction, reference) for reference in references), default=0.0)


def first_line(prediction: str) -> str:
    """The answer's first line that is not empty.

    Models go on with another example after the answer of a few-shot prompt.
    """
    return prediction.lstrip("\n").split("\n")[0]


def normalised(text: str) -> str:
    """As SQuAD compares answers: lower case, no punctuation, no articles, single spaces."""
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def qa_f1(prediction: str, reference: str) -> float:
    """F1 of the words of both answers, each as often as it occurs."""
    said, wanted = (normalised(text).split() for text in (prediction, reference))
    same = sum((Counter(said) & Counter(wanted)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(said), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 over the number of classes that the answer names, if the right one is among them.

    A class whose name is part of the right one's does not count as named. The published code takes
    it out of the list that it is walking through, so the one behind it is never looked at; scores
    depend on it, and so does this.
    """
    named = [name for name in classes if name in prediction]
    for name in named:
        if name in reference and name != reference:
            named.remove(name)
    return 1.0 / len(named) if reference in named else 0.0


def count(prediction: str, reference: str) -> float:
    """How many of the numbers in the answer are the right one."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str) -> float:
    """How many of the numbers in the answer are the right paragraph's.

    Args:
        prediction: the answer.
        reference: such as "Paragraph 12".
    """
    paragraph = re.search(PARAGRAPH, reference)
    return count(prediction, paragraph[1]) if paragraph else 0.0


PARAGRAPH = r"Paragraph (\d+)"
"""What a right answer of a retrieval looks like."""


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
    ratio = _RATIOS[backend](line, reference)
    return round(100 * ratio) / 100


def _difflib_ratio(first: str, second: str) -> float:
    return SequenceMatcher(None, first, second).ratio()


def _subsequence_ratio(first: str, second: str) -> float:
    """Of the characters of both, the fraction in a longest common subsequence."""
    return 2 * len(common_subsequence(first, second)) / (len(first) + len(second))


_RATIOS: dict[CodeSimilarity, Callable[[str, str], float]] = {
    "difflib": _difflib_ratio,
    "levenshtein": _subsequence_ratio,
}
