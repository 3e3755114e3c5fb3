"""Budgets that are the sum of two parts, given as the whole or as the parts."""

from collections.abc import Callable
from typing import Any

from snapkv.errors import InvalidArgumentError
from snapkv.validation import DEFAULT_BUDGET, require_int


def split_budget(
    policy: Any, first: str, second: str, *, default_second: Callable[[int], int]
) -> None:
    """Complete a frozen policy's `budget`, `first` and `second`, of which two determine the third.

    Args:
        policy: the policy being made; its three fields are set.
        first: name of the older part, which may be 0.
        second: name of the recent part, at least 1.
        default_second: the recent part of a budget where only the budget is given.

    Raises:
        InvalidArgumentError: the parts do not add up, or leave nothing for one of them.
    """
    budget, head, tail = policy.budget, getattr(policy, first), getattr(policy, second)
    for name, value, minimum in (("budget", budget, 1), (first, head, 0), (second, tail, 1)):
        if value is not None:
            require_int(name, value, minimum=minimum)
    if budget is None:
        budget = DEFAULT_BUDGET if head is None or tail is None else head + tail
    if tail is None:
        tail = budget - head if head is not None else default_second(budget)
    if head is None:
        head = budget - tail
    if head < 0 or tail < 1 or head + tail != budget:
        raise InvalidArgumentError(
            f"budget: expected {first} + {second}, with {second} at least 1, got budget={budget}, "
            f"{first}={head} and {second}={tail}; a budget of at least {max(head, 0) + 1} would do"
        )
    for name, value in (("budget", budget), (first, head), (second, tail)):
        object.__setattr__(policy, name, value)
