"""Means of samples that are drawn anew; apart from `intervals`, since numpy takes its time."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int_]
"""Indices of samples."""

_DIGITS = 12
"""Sums of differences that cancel out are zero, and not what rounding leaves of them."""


def resampled_means(
    columns: Sequence[Sequence[tuple[Sequence[float], tuple[str, ...] | None]]], resamples: int
) -> list[float]:
    """Means over columns of the means over cells of the means over samples, in ascending order.

    Args:
        columns: of each the cells: the scores of a cell's samples, and the conversations that they
            are turns of; cells with the same conversations draw the same of them.
        resamples: how often samples are drawn, with replacement, as many as a cell has.
    """
    # By numpy's own policy these are the same in every version of it.
    draws, known = np.random.RandomState(seed=0), dict[tuple[str, ...], Places]()
    means = np.mean([_resampled(cells, resamples, draws, known) for cells in columns], axis=0)
    ordered: list[float] = np.sort(means).round(_DIGITS).tolist()
    return ordered


def _resampled(
    cells: Sequence[tuple[Sequence[float], tuple[str, ...] | None]],
    resamples: int,
    draws: np.random.RandomState,
    known: dict[tuple[str, ...], Places],
) -> npt.NDArray[np.float64]:
    """(resamples,) means over cells of the means over samples that were drawn anew."""
    means = [
        np.asarray(cell)[_places((resamples, len(cell)), of_cell, draws, known)].mean(axis=1)
        for cell, of_cell in cells
    ]
    found: npt.NDArray[np.float64] = np.mean(means, axis=0)
    return found


def _places(
    size: tuple[int, int],
    conversations: tuple[str, ...] | None,
    draws: np.random.RandomState,
    known: dict[tuple[str, ...], Places],
) -> Places:
    """(resamples, samples) places in a cell; of conversations that were drawn before the same."""
    if conversations is None:
        return draws.randint(size[1], size=size)
    if conversations not in known:
        known[conversations] = draws.randint(size[1], size=size)
    return known[conversations]
