"""Sharing a whole number of slots out by fractions, without losing or inventing one."""

import math
from collections.abc import Sequence


def largest_remainder(shares: Sequence[float], total: int) -> list[int]:
    """Round shares to whole numbers that add up to `total`.

    Every share is rounded down; the slots left over go to the largest remainders, of equal ones to
    the smaller share, then to the first.

    Args:
        shares: non-negative, adding up to `total` but for rounding.
        total: what the result adds up to.
    """
    whole = [math.floor(share + 1e-9) for share in shares]
    order = sorted(
        range(len(shares)), key=lambda i: (-round(shares[i] - whole[i], 9), shares[i], i)
    )
    for index in order[: total - sum(whole)]:
        whole[index] += 1
    return whole
