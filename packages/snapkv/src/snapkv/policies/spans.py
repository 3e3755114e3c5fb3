"""Spans of positions that must be kept whatever their scores."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from snapkv.errors import InvalidTypeError, wrong
from snapkv.ops.numbers import on_device
from snapkv.validation import require_int

Span = tuple[int, int]
"""The positions from the first number to right before the second."""


@dataclass(frozen=True)
class Spans:
    """Ranges of positions in a conversation, not counting padding.

    Attributes:
        parts: half-open spans, ascending; no two of them touch or overlap.
    """

    parts: tuple[Span, ...]

    @classmethod
    def of(cls, argument: str, given: object) -> Self:
        """Create spans from pairs of positions, and merge spans that overlap or touch.

        Args:
            argument: the name of the argument, for errors.
            given: pairs of positions, as the user has passed them, in any order: the first position
                and the one after the last.

        Raises:
            InvalidTypeError: `given` is no sequence of pairs of integers.
            InvalidArgumentError: a position is negative, or a span is empty or reversed.
        """
        if isinstance(given, str) or not isinstance(given, Iterable):
            kind = type(given).__name__
            problem = f"expected a list of pairs of positions, but got {given!r} of type {kind}"
            raise wrong(argument, problem, "For example, pass [(0, 20)]", InvalidTypeError)
        merged: list[Span] = []
        for start, stop in sorted(require_span(argument, span) for span in given):
            if merged and start <= merged[-1][1]:
                start, stop = merged[-1][0], max(merged.pop()[1], stop)
            merged.append((start, stop))
        return cls(tuple(merged))

    def union(self, other: "Spans") -> "Spans":
        """Return the positions that are in at least one of the two."""
        return Spans.of("spans", self.parts + other.parts)

    def overlap(self, other: "Spans") -> "Spans":
        """Return the positions that are in both of the two."""
        return self.without(self.without(other))

    def without(self, other: "Spans") -> "Spans":
        """Return new spans with the positions that are not in `other`, in linear time."""
        left: list[Span] = []
        gone = deque(other.parts)
        for start, stop in self.parts:
            while gone and gone[0][0] < stop:
                begin, end = gone[0]
                left.append((start, begin))
                start = max(start, end)
                if end > stop:  # this span may reach into the next part
                    break
                gone.popleft()
            left.append((start, stop))
        return Spans(tuple(part for part in left if part[0] < part[1]))

    @property
    def tokens(self) -> int:
        """The number of positions in all spans together."""
        return sum(stop - start for start, stop in self.parts)

    def among_first(self, tokens: int) -> int:
        """Return the number of the first `tokens` positions that are in a span."""
        return sum(max(0, min(stop, tokens) - start) for start, stop in self.parts)

    def cover(self, positions: Tensor) -> Tensor:
        """Return a mask of the positions that are in a span.

        It takes the same few operations however many spans there are.

        Args:
            positions: integers of any shape; negative ones, such as those of padding, lie in no
                span.

        Returns:
            Bool of the same shape, on the same device.
        """
        # The bounds ascend (start, stop, start, ...), so a position lies in a span if an odd number
        # of them is at or below it.
        bounds = on_device([bound for part in self.parts for bound in part], positions.device)
        passed = torch.searchsorted(bounds, positions.long().contiguous(), right=True)
        return passed % 2 == 1


def require_span(argument: str, span: Any) -> Span:
    """Check that `span` is a pair of positions, and return it as a tuple of two ints.

    Args:
        argument: the name of the argument, for errors.
        span: a tuple or list of the first position and the one after the last.

    Raises:
        InvalidTypeError: `span` is no pair, or holds something that is no integer.
        InvalidArgumentError: a position is negative, or the span is empty or reversed.
    """
    if not isinstance(span, tuple | list) or len(span) != 2:
        problem = f"expected a pair of positions, but got {span!r} of type {type(span).__name__}"
        remedy = "For example, pass (0, 20) for the first twenty tokens"
        raise wrong(argument, problem, remedy, InvalidTypeError)
    start, stop = (require_int(argument, each, minimum=0) for each in span)
    if start >= stop:
        problem = f"expected a span with start < stop, but got ({start}, {stop})"
        raise wrong(argument, problem, "Use the position after the last token as the stop")
    return start, stop


def require_fit(policy: str, tokens: int, room: int, place: str) -> None:
    """Check that there is enough room for all protected tokens.

    Args:
        policy: the name of the method.
        tokens: how many tokens must be kept.
        room: how many the method can hold.
        place: where it holds them, for the message.

    Raises:
        InvalidArgumentError: `tokens` is larger than `room`.
    """
    if tokens > room:
        problem = (
            f"expected at most {room:,} tokens, because {policy} cannot keep more {place}, but got "
            f"{tokens:,}"
        )
        raise wrong("protect", problem, "Increase the budget, or protect fewer tokens")
