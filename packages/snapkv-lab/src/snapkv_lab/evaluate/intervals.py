"""How sure a mean is: intervals by the percentile bootstrap over samples."""

from collections.abc import Sequence
from statistics import fmean

RESAMPLES = 2_000
"""How often samples are drawn anew."""

LEVEL = 0.95
"""How much of what was drawn lies within an interval."""

METHOD = (
    f"percentile bootstrap over samples, {RESAMPLES:,} resamples, too narrow where cells have few"
)
"""What tables and pages say of their intervals."""

Conversations = tuple[str, ...] | None
"""Of each sample of a cell the conversation it is a turn of; None where samples are no turns."""

Cell = tuple[Sequence[float], Conversations]
"""Scores of its samples, and whose turns they are."""

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
    cell. Samples that are all alike give one without width, whatever their number: nothing that was
    seen says how often others differ.

    Args:
        columns: of each the cells, of each the scores or losses of its samples, or differences.
        conversations: of each column and cell; None where no sample is a turn of one.

    Returns:
        None where there is nothing to draw from: no column, or one of a single sample.
    """
    of_cells = conversations or [[None] * len(cells) for cells in columns]
    drawn = [_drawn_from(*column) for column in zip(columns, of_cells, strict=True)]
    if not drawn or any(len(cell) < 2 for cells in drawn for cell, _ in cells):
        return None
    from snapkv_lab.evaluate.resampling import resampled_means  # numpy, only where there is a mean

    ordered = resampled_means(drawn, RESAMPLES)
    tail = round(RESAMPLES * (1 - LEVEL) / 2)
    return ordered[tail], ordered[-1 - tail]


def _drawn_from(
    cells: Sequence[Sequence[float]], conversations: Sequence[Conversations]
) -> list[Cell]:
    """The cells, or where one is a single sample their means as one cell."""
    if cells and all(len(cell) > 1 for cell in cells):
        return list(zip(cells, conversations, strict=True))
    return [([fmean(cell) for cell in cells if cell], None)]
