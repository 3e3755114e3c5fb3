"""How sure a mean is, and how much better or worse than the full cache's.

Intervals are by the percentile bootstrap over samples; differences are what the paper's Tables 3 to
5 report.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, Literal

from snapkv_lab.rows import Row

RESAMPLES = 2_000
LEVEL = 0.95

METHOD = (
    f"percentile bootstrap over samples, {RESAMPLES:,} resamples, too narrow where cells have few"
)
"""What tables and pages say of their intervals."""

_DIGITS = 12  # sums of differences that cancel out are zero, and not what rounding leaves of them

Cell = tuple[Sequence[float], tuple[str, ...] | None]
"""Scores, losses or differences of a cell's samples, and the conversation each is a turn of."""

Interval = tuple[float, float]
"""Where it begins and ends, both included; scores from 0 to 1, losses in nats per token."""

Measure = Literal["score", "loss"]
"""What of a row is compared."""

BY_SAMPLE: dict[Measure, str] = {"score": "scores", "loss": "losses"}
"""Where a row has it by sample."""

Line = tuple[str, str]
"""Method and question: a line of a table."""


def mean_interval(columns: Iterable[Sequence[Cell]]) -> Interval | None:
    """Of the mean over columns of the mean over cells of the mean over samples.

    Samples are drawn with replacement from their own cell, as many as it has; the interval is what
    is left of the means without the lowest and the highest 2.5 % (Efron and Tibshirani 1993,
    chapter 13). Where a cell of a column has one sample only, the means of the column's cells are
    drawn instead, so that what differs from cell to cell counts as chance and the interval is
    rather too wide. The same numbers give the same interval, on every machine.

    Turns of a conversation are not chances of their own: cells that hold turns of the same
    conversations draw the same ones, so that a conversation comes with all of its turns. A cell in
    which one of them has no answer draws for itself.

    Of few samples an interval is too narrow, by a factor of about sqrt((n - 1) / n) for n in a
    cell. Samples that are all alike give one without width, whatever their number. None where there
    is nothing to draw from: no column, or one of a single sample.
    """
    drawn = [_drawn_from(cells) for cells in columns]
    if not drawn or any(len(samples) < 2 for cells in drawn for samples, _ in cells):
        return None
    ordered = _resampled_means(drawn)
    tail = round(RESAMPLES * (1 - LEVEL) / 2)
    return ordered[tail], ordered[-1 - tail]


def _drawn_from(cells: Sequence[Cell]) -> Sequence[Cell]:
    """The cells, or where one is a single sample their means as one cell."""
    if cells and all(len(samples) > 1 for samples, _ in cells):
        return cells
    return [([fmean(samples) for samples, _ in cells if samples], None)]


def _resampled_means(columns: Sequence[Sequence[Cell]]) -> list[float]:
    """Means over columns, cells and samples drawn again, in ascending order."""
    import numpy as np  # only where there is a mean: it takes its time

    # By numpy's own policy these are the same in every version of it.
    draws, known = np.random.RandomState(seed=0), dict[tuple[str, ...], Any]()

    def resampled(samples: Sequence[float], conversations: tuple[str, ...] | None) -> Any:
        """(resamples,) means of a cell; of conversations that were drawn before the same."""
        places = None if conversations is None else known.get(conversations)
        if places is None:
            places = draws.randint(len(samples), size=(RESAMPLES, len(samples)))
        if conversations is not None:
            known[conversations] = places
        return np.asarray(samples)[places].mean(axis=1)

    means = [np.mean([resampled(*cell) for cell in cells], axis=0) for cells in columns]
    ordered: list[float] = np.sort(np.mean(means, axis=0)).round(_DIGITS).tolist()
    return ordered


def sample_cell(row: Row, of: Measure, samples: Iterable[str] | None = None) -> Cell:
    """What a row has by sample, of some of them or all, and whose turns they are."""
    found, known = row[BY_SAMPLE[of]], row.get("conversations")
    names = list(found if samples is None else samples)
    return [found[name] for name in names], known and tuple(known[name] for name in names)


def cell_differences(rows: Sequence[Row], of: Measure = "score") -> list[Row | None]:
    """Of every row to the full cache's of its cell; None for that one itself, or without one.

    A difference is score or loss less the full cache's over the `samples` that both have answered,
    with its `interval`, for which the two answers to a sample are drawn together: above 0 a method
    scores better, below 0 it loses less.
    """
    full = _full_rows(rows)
    pairs = [_pairs(row, full, of) for row in rows]
    return [_difference([[cell]], of) if cell else None for cell in pairs]


def line_differences(rows: Iterable[Row], axis: str, of: Measure = "score") -> dict[Line, Row]:
    """By method and question: the mean over the columns of an axis, as a table shows scores.

    Cells in which a method and the full cache share no answer are left out of both means.
    """
    rows = list(rows)
    full = _full_rows(rows)
    lines: dict[Line, dict[str, list[Cell]]] = {}
    for row in rows:
        if cell := _pairs(row, full, of):
            columns = lines.setdefault((row["method"], row["question"]), {})
            columns.setdefault(json.dumps(row["cell"][axis]), []).append(cell)
    return {line: _difference(list(columns.values()), of) for line, columns in lines.items()}


def relative_differences(rows: Iterable[Row]) -> dict[Line, float]:
    """By method and question: mean score over the full cache's, less 1; -0.012 is 1.2 % worse.

    Both means are over the cells in which both have a score, so that a cell for which the full
    cache had no memory changes nothing. Missing are the full cache itself, and methods that share
    no cell with it or with a full cache that scores 0.
    """
    scored = [row for row in rows if row["score"] is not None]
    full = _full_rows(scored)
    pairs: dict[Line, list[tuple[float, float]]] = defaultdict(list)
    for row in scored:
        if not is_full_cache(row) and _place(row) in full:
            pair = (row["score"], full[_place(row)]["score"])
            pairs[row["method"], row["question"]].append(pair)
    means = {line: tuple(map(fmean, zip(*of, strict=True))) for line, of in pairs.items()}
    return {line: own / others - 1 for line, (own, others) in means.items() if others}


def is_full_cache(row: Row) -> bool:
    """Whether a row is of the full cache, filled by reading exactly."""
    from snapkv.policies import FullCache  # imports torch, which tables do without

    return row["policy"]["name"] == FullCache.name and "prefill" not in row["policy"]


def excludes_zero(difference: Row) -> bool:
    """Whether its interval leaves out zero. Where it does not, both may still differ."""
    ends = difference["interval"]
    return ends is not None and not ends[0] <= 0 <= ends[1]


def _difference(columns: Sequence[Sequence[Cell]], of: Measure) -> Row:
    interval = mean_interval(columns)
    return {
        of: fmean(fmean(fmean(numbers) for numbers, _ in cells) for cells in columns),
        "interval": interval and list(interval),
        "samples": sum(len(numbers) for cells in columns for numbers, _ in cells),
    }


def _full_rows(rows: Iterable[Row]) -> dict[str, Row]:
    return {_place(row): row for row in rows if is_full_cache(row)}


def _pairs(row: Row, full: dict[str, Row], of: Measure) -> Cell | None:
    """Score or loss less the full cache's, sample by sample; None without any to compare."""
    if is_full_cache(row) or _place(row) not in full:
        return None
    others = full[_place(row)][BY_SAMPLE[of]]
    shared = [name for name in row[BY_SAMPLE[of]] if name in others]
    own, conversations = sample_cell(row, of, shared)
    if not shared:
        return None
    return [mine - others[name] for mine, name in zip(own, shared, strict=True)], conversations


def _place(row: Row) -> str:
    return json.dumps([row["question"], row["cell"]])
