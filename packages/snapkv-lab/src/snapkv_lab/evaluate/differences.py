"""How much better or worse than the full cache: what the paper's Tables 3 to 5 report, how sure."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, Self

from snapkv_lab.evaluate.intervals import Conversations, Interval, mean_interval
from snapkv_lab.evaluate.store import Record

Measure = Literal["score", "loss"]
"""What of a row is compared; under its plural the row has it by sample."""

_BY_SAMPLE: dict[Measure, str] = {"score": "scores", "loss": "losses"}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Score or loss less the full cache's, over the samples that both have answered.

    Attributes:
        mean: of scores from -1 to 1, above 0 the method is better; of losses in nats per token,
            below 0 the method is better.
        interval: of the mean, see `mean_interval`, with the two answers to a sample drawn together;
            None where a column has one sample only.
        samples: that both have answered.
    """

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
    """Of every row to the full cache's of its cell; None for that one itself, or without one.

    Args:
        rows: of `snapkv_lab.evaluate.summary`.
        of: what is compared.
    """
    full = _full_rows(rows)
    return [_difference([[pairs]]) if (pairs := _pairs(row, full, of)) else None for row in rows]


def line_differences(
    rows: Iterable[Record], axis: str, of: Measure = "score"
) -> dict[tuple[str, str], Difference]:
    """By method and question: the mean over the columns of an axis, as a table shows scores.

    Cells in which a method and the full cache share no answer are left out of both means.

    Args:
        rows: of `snapkv_lab.evaluate.summary`.
        axis: the key of the cells that gives the columns.
        of: what is compared.
    """
    rows = list(rows)
    full = _full_rows(rows)
    lines: dict[tuple[str, str], dict[str, list[_Pairs]]] = {}
    for row in rows:
        if pairs := _pairs(row, full, of):
            columns = lines.setdefault((row["method"], row["question"]), {})
            columns.setdefault(json.dumps(row["cell"][axis]), []).append(pairs)
    return {line: _difference(list(columns.values())) for line, columns in lines.items()}


_Pairs = tuple[list[float], Conversations]
"""Differences of a cell's samples, and the conversations they are turns of."""


def _difference(columns: list[list[_Pairs]]) -> Difference:
    pairs = [[of_cell for of_cell, _ in cells] for cells in columns]
    return Difference(
        mean=fmean(fmean(map(fmean, cells)) for cells in pairs),
        interval=mean_interval(pairs, [[spoken for _, spoken in cells] for cells in columns]),
        samples=sum(len(of_cell) for cells in pairs for of_cell in cells),
    )


def conversations_of(row: Record, samples: Iterable[str]) -> Conversations:
    """The conversations that some samples of a row are turns of; None where they are no turns."""
    known = row.get("conversations")
    return known and tuple(known[sample] for sample in samples)


def _full_rows(rows: Iterable[Record]) -> dict[str, Record]:
    """The rows of the full cache by question and cell."""
    return {_place(row): row for row in rows if is_full(row)}


def _pairs(row: Record, full: dict[str, Record], of: Measure) -> _Pairs | None:
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

    Args:
        rows: of `snapkv_lab.evaluate.summary`.
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
