"""ROUGE-L as the package `rouge` 1.0.1 counts it, which published LongBench scores were made with.

A text is cut into sentences at every full stop, a sentence into words at white space. Every pair of
sentences has a longest common subsequence; the words of all of them make up one set, and precision
and recall are its size over the number of different words of either text. Other packages of that
name count otherwise and give other numbers.

One difference is meant: the package walks through a subsequence by recursion, fails on sentences of
about a thousand words together, and LongBench counts that failure as 0. Here such a pair gets the
score that the definition gives it.
"""

from collections.abc import Sequence


def rouge_l(prediction: str, reference: str) -> float:
    """F-measure of the summary-level ROUGE-L, 0 to 1; 0 where a text has no sentence."""
    said, wanted = _sentences(prediction), _sentences(reference)
    if not said or not wanted:
        return 0.0
    common: set[str] = set()
    for reference_words in wanted:
        for words in said:
            common.update(common_subsequence(reference_words, words))
    precision = len(common) / len(set().union(*said))
    recall = len(common) / len(set().union(*wanted))
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def common_subsequence(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """A longest common subsequence, last item first.

    Of several that are equally long, the one that the package finds: from the ends, an item of
    `first` is left out only where that loses nothing that leaving out one of `second` would keep.
    """
    lengths = _prefix_lengths(first, second)
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


def _prefix_lengths(first: Sequence[str], second: Sequence[str]) -> list[list[int]]:
    """Length of the longest common subsequence of every pair of prefixes."""
    rows = [[0] * (len(second) + 1)]
    for item in first:
        above, row = rows[-1], [0]
        for j, other in enumerate(second):
            row.append(above[j] + 1 if item == other else max(above[j + 1], row[j]))
        rows.append(row)
    return rows


def _sentences(text: str) -> list[list[str]]:
    """The words of every sentence; a sentence of white space alone has one word, the empty one."""
    return [part.split() or [""] for part in text.split(".") if part]
