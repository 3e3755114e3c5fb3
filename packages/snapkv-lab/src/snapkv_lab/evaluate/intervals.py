"""How sure a mean is, and how much better or worse than the full cache's.

Intervals are by the percentile bootstrap over samples; differences are what the paper's Tables 3 to
5 report.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, Self

from snapkv_lab.evaluate.store import Record

RESAMPLES = 2_000
"""How often samples are drawn anew."""

LEVEL = 0.95
"""How much of what was drawn lies within an interval."""

METHOD = (
    f"percentile bootstrap over samples, {RESAMPLES:,} resamples, too narrow where cells have few"
)
"""What tables and pages say of their intervals."""

_DIGITS = 12
"""Sums of differences that cancel out are zero, and not what rounding leaves of them."""

Conversations = tuple[str, ...] | None
"""Of each sample of a cell the conversation it is a turn of; None where samples are no turns."""

Cell = tuple[Sequence[float], Conversations]
"""Scores, losses or differences of a cell's samples, and whose turns they are."""

Interval = tuple[float, float]
"""Where it begins and ends, both included; scores from 0 to 1, losses in nats per token."""


def mean_interval(
    columns: Sequence[Sequence[Sequence[float]]],
    conversations: Sequence[Sequence[Conversations]] | None = None,
) -> Interval | None:
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
    cell. Samples that are all alike give one without width, whatever their number.

    Returns:
        None where there is nothing to draw from: no column, or one of a single sample.
    """
    of_cells = conversations or [[None] * len(cells) for cells in columns]
    drawn = [_drawn_from(*column) for column in zip(columns, of_cells, strict=True)]
    if not drawn or any(len(cell) < 2 for cells in drawn for cell, _ in cells):
        return None
    ordered = _resampled_means(drawn)
    tail = round(RESAMPLES * (1 - LEVEL) / 2)
    return ordered[tail], ordered[-1 - tail]


def _drawn_from(
    cells: Sequence[Sequence[float]], conversations: Sequence[Conversations]
) -> list[Cell]:
    """The cells, or where one is a single sample their means as one cell."""
    if cells and all(len(cell) > 1 for cell in cells):
        return list(zip(cells, conversations, strict=True))
    return [([fmean(cell) for cell in cells if cell], None)]


def _resampled_means(columns: Sequence[Sequence[Cell]]) -> list[float]:
    """Means over columns, cells and samples drawn anew, in ascending order."""
    import numpy as np  # only where there is a mean: it takes its time

    # By numpy's own policy these are the same in every version of it.
    draws, known = np.random.RandomState(seed=0), dict[tuple[str, ...], Any]()

    def resampled(samples: Sequence[float], conversations: Conversations) -> Any:
        """(resamples,) means of a cell; of conversations that were drawn before the same."""
        places = None if conversations is None else known.get(conversations)
        if places is None:
            places = draws.randint(len(samples), size=(RESAMPLES, len(samples)))
        if conversations is not None:
            known[conversations] = places
        return np.asarray(samples)[places].mean(axis=1)

    means = np.mean(
        [np.mean([resampled(*cell) for cell in cells], axis=0) for cells in columns], axis=0
    )
    ordered: list[float] = np.sort(means).round(_DIGITS).tolist()
    return ordered


Measure = Literal["score", "loss"]
"""What of a row is compared; under its plural the row has it by sample."""

_BY_SAMPLE: dict[Measure, str] = {"score": "scores", "loss": "losses"}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Score or loss less the full cache's, over the samples that both have answered."""

    mean: float
    interval: Interval | None
    samples: int

    @property
    def is_seen(self) -> bool:
        """Whether the interval leaves out zero. Where it does not, both may still differ."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]

    @classmethod
    def read(cls, described: Record, of: Measure = "score") -> Self:
        """What `describe` gave."""
        ends = described["interval"]
        interval = None if ends is None else (ends[0], ends[1])
        return cls(mean=described[of], interval=interval, samples=described["samples"])

    def describe(self, of: Measure = "score") -> Record:
        """Ready for JSON."""
        interval = self.interval and list(self.interval)
        return {of: self.mean, "interval": interval, "samples": self.samples}


def is_full(row: Record) -> bool:
    """Whether a row is of the full cache, filled by reading exactly."""
    from snapkv.policies import FullCache  # imports torch, which tables do without

    return row["policy"]["name"] == FullCache.name and "prefill" not in row["policy"]


def cell_differences(rows: Sequence[Record], of: Measure = "score") -> list[Difference | None]:
    """Of every row to the full cache's of its cell; None for that one itself, or without one."""
    full = _full_rows(rows)
    return [_difference([[pairs]]) if (pairs := _pairs(row, full, of)) else None for row in rows]


def line_differences(
    rows: Iterable[Record], axis: str, of: Measure = "score"
) -> dict[tuple[str, str], Difference]:
    """By method and question: the mean over the columns of an axis, as a table shows scores.

    Cells in which a method and the full cache share no answer are left out of both means.
    """
    rows = list(rows)
    full = _full_rows(rows)
    lines: dict[tuple[str, str], dict[str, list[Cell]]] = {}
    for row in rows:
        if pairs := _pairs(row, full, of):
            columns = lines.setdefault((row["method"], row["question"]), {})
            columns.setdefault(json.dumps(row["cell"][axis]), []).append(pairs)
    return {line: _difference(list(columns.values())) for line, columns in lines.items()}


def interval_of(columns: Iterable[Sequence[Cell]]) -> Interval | None:
    """`mean_interval` of cells that say whose turns their samples are."""
    columns = list(columns)
    numbers = [[of_cell for of_cell, _ in cells] for cells in columns]
    return mean_interval(numbers, [[spoken for _, spoken in cells] for cells in columns])


def conversations_of(row: Record, samples: Iterable[str]) -> Conversations:
    """The conversations that some samples of a row are turns of; None where they are no turns."""
    known = row.get("conversations")
    return known and tuple(known[sample] for sample in samples)


def _difference(columns: list[list[Cell]]) -> Difference:
    return Difference(
        mean=fmean(fmean(fmean(of_cell) for of_cell, _ in cells) for cells in columns),
        interval=interval_of(columns),
        samples=sum(len(of_cell) for cells in columns for of_cell, _ in cells),
    )


def _full_rows(rows: Iterable[Record]) -> dict[str, Record]:
    return {_place(row): row for row in rows if is_full(row)}


def _pairs(row: Record, full: dict[str, Record], of: Measure) -> Cell | None:
    """Score or loss less the full cache's, sample by sample; None without any to compare."""
    if is_full(row) or _place(row) not in full:
        return None
    own, others = (each[_BY_SAMPLE[of]] for each in (row, full[_place(row)]))
    shared = [name for name in own if name in others]
    if not shared:
        return None
    return [own[name] - others[name] for name in shared], conversations_of(row, shared)


def _place(row: Record) -> str:
    return json.dumps([row["question"], row["cell"]])


def relative_differences(rows: Iterable[Record]) -> dict[tuple[str, str], float]:
    """By method and question: mean score over the full cache's, less 1; -0.012 is 1.2 % worse.

    Both means are over the cells in which both have a score, so that a cell for which the full
    cache had no memory changes nothing. Missing are the full cache itself, and methods that share
    no cell with it or with a full cache that scores 0.
    """
    baseline: dict[str, float] = {}
    others: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row["score"] is None:
            continue
        if is_full(row):
            baseline[_place(row)] = row["score"]
        else:
            others.setdefault((row["method"], row["question"]), {})[_place(row)] = row["score"]
    found = {}
    for line, scores in others.items():
        shared = [cell for cell in scores if cell in baseline]
        if any(baseline[cell] for cell in shared):
            means = [fmean(of[cell] for cell in shared) for of in (scores, baseline)]
            found[line] = means[0] / means[1] - 1
    return found
