"""Confidence intervals of means, and differences from the full cache.

The intervals come from the percentile bootstrap over samples. The differences are those that the
paper reports in its Tables 3 to 5.
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
"""How the intervals were computed, as tables and pages describe it."""

_DIGITS = 12  # rounds sums of differences that cancel out to zero

Cell = tuple[Sequence[float], tuple[str, ...] | None]
"""The scores, losses or differences of a cell's samples, and the conversation of each sample."""

Interval = tuple[float, float]
"""The lower and the upper end: scores from 0 to 1, or losses in nats per token."""

Measure = Literal["score", "loss"]
"""The field of a row that is compared."""

BY_SAMPLE: dict[Measure, str] = {"score": "scores", "loss": "losses"}
"""The field of a row that has the values of single samples."""

Line = tuple[str, str]
"""The method and the question of a line in a table."""


def mean_interval(columns: Iterable[Sequence[Cell]]) -> Interval | None:
    """Return the 95 % confidence interval of a mean over columns, cells and samples.

    The mean over the samples of each cell is averaged over the cells of each column, and then over
    the columns. Samples are drawn with replacement from their own cell, as many as it has; the
    interval leaves out the lowest and the highest 2.5 % of the resulting means (Efron and
    Tibshirani 1993, chapter 13). If a cell of a column has one sample only, the means of the
    column's cells are drawn instead. Differences between cells then count as chance, and the
    interval is rather too wide. The same numbers give the same interval on every machine.

    The turns of a conversation are not independent. Cells that hold turns of the same conversations
    draw the same conversations, so that a conversation comes with all of its turns. A cell in which
    one of them has no answer draws by itself.

    With few samples the interval is too narrow, by a factor of about sqrt((n - 1) / n) for n
    samples in a cell. Samples that are all equal give an interval without width.

    Returns:
        The lower and the upper end, or None if there is no column or a column has one sample only.
    """
    groups = [_drawn_from(cells) for cells in columns]
    if not groups or any(len(samples) < 2 for cells in groups for samples, _ in cells):
        return None
    ordered = _resampled_means(groups)
    tail = round(RESAMPLES * (1 - LEVEL) / 2)
    return ordered[tail], ordered[-1 - tail]


def _drawn_from(cells: Sequence[Cell]) -> Sequence[Cell]:
    """Return the cells from whose samples the means of a column are drawn: the given cells, or, if
    one of them has fewer than two samples, a single cell whose samples are their means. Empty cells
    are left out of these means.
    """
    if cells and all(len(samples) > 1 for samples, _ in cells):
        return cells
    return [([fmean(samples) for samples, _ in cells if samples], None)]


def _resampled_means(columns: Sequence[Sequence[Cell]]) -> list[float]:
    """Resample `RESAMPLES` times, and return the means over all columns in ascending order.

    Args:
        columns: the cells of each column. Every cell must have at least one sample.
    """
    import numpy as np  # slow, and only needed for means

    # numpy guarantees that this generator draws the same numbers in every version.
    draws, draws_of = np.random.RandomState(seed=0), dict[tuple[str, ...], Any]()

    def resampled(samples: Sequence[float], conversations: tuple[str, ...] | None) -> Any:
        """Return the means of a cell after each resampling, as an array of `RESAMPLES` numbers.
        Cells with the same conversations use the same draws.
        """
        places = None if conversations is None else draws_of.get(conversations)
        if places is None:
            places = draws.randint(len(samples), size=(RESAMPLES, len(samples)))
        if conversations is not None:
            draws_of[conversations] = places
        return np.asarray(samples)[places].mean(axis=1)

    means = [np.mean([resampled(*cell) for cell in cells], axis=0) for cells in columns]
    ordered: list[float] = np.sort(np.mean(means, axis=0)).round(_DIGITS).tolist()
    return ordered


def sample_cell(row: Row, of: Measure, samples: Iterable[str] | None = None) -> Cell:
    """Return the values of a row by sample, and the conversations of these samples.

    Args:
        row: a row of `summarise`.
        of: "score" or "loss"; the row must have its field in `BY_SAMPLE`.
        samples: names of the samples; None for all.
    """
    values, conversations = row[BY_SAMPLE[of]], row.get("conversations")
    names = list(values if samples is None else samples)
    return [values[name] for name in names], conversations and tuple(
        conversations[name] for name in names
    )


def cell_differences(rows: Sequence[Row], of: Measure = "score") -> list[Row | None]:
    """Compare each row with the row of the full cache for the same cell.

    A difference is the mean score or loss minus that of the full cache, over the samples that both
    have answered. For its interval the two answers to a sample are drawn together. A method is
    better than the full cache if the difference of the scores is above 0, or that of the losses
    below 0.

    Returns:
        One difference per row, with the keys "score" or "loss", "interval" (a list of two numbers
        or None) and "samples" (their number). It is None for the full cache itself, and if the full
        cache has no answer in common with the row.
    """
    full = _full_rows(rows)
    pairs = [_pairs(row, full, of) for row in rows]
    return [_difference([[cell]], of) if cell else None for cell in pairs]


def line_differences(rows: Iterable[Row], axis: str, of: Measure = "score") -> dict[Line, Row]:
    """Return the differences between each method and the full cache.

    Each is a mean over the columns of an axis, as tables show scores. A cell in which a method and
    the full cache share no answer is left out of both means.

    Args:
        rows: the rows of `summarise`.
        axis: the key of the cells whose values are the columns.
        of: "score" or "loss".

    Returns:
        The differences by method and question, each as in `cell_differences`. The full cache, and
        methods that share no answer with it, are missing.
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
    """Return the relative difference between the score of each method and the full cache.

    A value of -0.012 means that the score is 1.2 % lower. Both means are over the cells in which
    both have a score, so that a cell that did not fit into memory with the full cache changes
    nothing. The full cache itself is left out, and so are methods that share no cell with a full
    cache that scores above 0.

    Returns:
        The differences by method and question.
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
    """Return whether a row belongs to the full cache, read exactly and not quantized.

    All other rows are compared with this one.
    """
    from snapkv.policies import FullCache  # imports torch, which tables do not need

    return row["policy"]["name"] == FullCache.name and not {"prefill", "bits"} & {*row["policy"]}


def excludes_zero(difference: Row) -> bool:
    """Return whether a difference has a confidence interval that does not contain zero.

    Args:
        difference: a row with the key "interval", as `cell_differences` returns it.
    """
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
    """Return the difference between a method and the full cache for each sample that both have
    answered, with the conversations of these samples.

    Args:
        row: a row of results.
        full: the rows of the full cache, by question and cell.
        of: "score" or "loss".

    Returns:
        The differences and the conversations. None if there is no such sample, or if the row is
        that of the full cache.
    """
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
