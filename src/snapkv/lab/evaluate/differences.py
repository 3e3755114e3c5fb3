"""How much better or worse than the full cache: what the paper's Tables 3 to 5 report."""

import json
from collections.abc import Iterable
from statistics import fmean

from snapkv.lab.evaluate.store import Record
from snapkv.policies import FullCache


def relative_differences(rows: Iterable[Record]) -> dict[tuple[str, str], float]:
    """By method and question: mean score over the full cache's, less 1; -0.012 is 1.2 % worse.

    Both means are over the cells in which both have a score, so that a cell for which the full
    cache had no memory changes nothing. Missing are the full cache itself, and methods that share
    no cell with it or with a full cache that scores 0.

    Args:
        rows: of `snapkv.lab.evaluate.summary`.
    """
    baseline: dict[str, float] = {}
    others: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row["score"] is None:
            continue
        cell = json.dumps([row["question"], row["cell"]])
        if row["policy"]["name"] == FullCache.name:
            baseline[cell] = row["score"]
        else:
            others.setdefault((row["method"], row["question"]), {})[cell] = row["score"]
    found = {}
    for line, scores in others.items():
        shared = [cell for cell in scores if cell in baseline]
        if any(baseline[cell] for cell in shared):
            means = [fmean(of[cell] for cell in shared) for of in (scores, baseline)]
            found[line] = means[0] / means[1] - 1
    return found
