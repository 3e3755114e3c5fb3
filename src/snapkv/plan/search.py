"""The largest number that fits."""

from collections.abc import Callable


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, if smaller ones do as well; 0 for none."""
    low, high = 0, max(most, 0)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
