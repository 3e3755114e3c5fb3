"""BLEU of one text beside one other (Papineni et al., 2002), without smoothing."""

import math
from collections import Counter
from collections.abc import Sequence

_LONGEST = 4


def bleu(said: Sequence[str], wanted: Sequence[str]) -> float:
    """The geometric mean of four precisions, less what is missing: 0 to 1.

    Precision n is the share of the answer's runs of n words that the right text has too, each as
    often as it has it. An answer that is shorter than the right text gets less by the brevity
    penalty exp(1 - wanted / said). Where a precision is 0, or there is no run of four words, it is
    0; smoothed variants give such pairs a little, and all others the same.

    Args:
        said: words of the answer.
        wanted: words of the right text.
    """
    logarithms = []
    for size in range(1, _LONGEST + 1):
        own, right = _runs(said, size), _runs(wanted, size)
        same = (own & right).total()
        if not same:
            return 0.0
        logarithms.append(math.log(same / own.total()))
    shortfall = min(0.0, 1 - len(wanted) / len(said))
    return math.exp(shortfall + sum(logarithms) / _LONGEST)


def _runs(words: Sequence[str], size: int) -> Counter[tuple[str, ...]]:
    """Every run of so many words, and how often it occurs."""
    starts = range(len(words) - size + 1)
    return Counter(tuple(words[start : start + size]) for start in starts)
