"""Who gives room back, where several tenants hold what there is little of."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar


class _Owned(Protocol):
    @property
    def tenant(self) -> str: ...


Item = TypeVar("Item", bound=_Owned)


def going(
    idle: Sequence[Item], taken: Counter[str], most: int, size_of: Callable[[Item], int]
) -> tuple[list[Item], int]:
    """Which of the idle ones go, so that what is taken fits: of the tenant that has most.

    A tenant's share is an equal part for each who has any. It may take what others leave; what is
    within another's share stays.

    Args:
        idle: the least recently used first.
        taken: by tenant, with what is to come.
        most: that all of them may take together.
        size_of: what one of the idle takes.

    Returns:
        Them, and how much is too much even then, 0 for nothing.
    """
    share, taken, idle, found = most / len(taken), Counter(taken), list(idle), list[Item]()
    while taken.total() > most:
        beyond = [one for one in idle if taken[one.tenant] > share]
        if not beyond:
            break
        found.append(max(beyond, key=lambda one: taken[one.tenant]))  # of equals the first
        idle.remove(found[-1])
        taken[found[-1].tenant] -= size_of(found[-1])
    return found, max(0, taken.total() - most)
