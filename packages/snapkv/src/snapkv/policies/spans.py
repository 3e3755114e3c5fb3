"""Spans of positions that must stay, whatever the scores."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from snapkv.errors import InvalidArgumentError, InvalidTypeError
from snapkv.ops.numbers import on_device
from snapkv.validation import require_int

Span = tuple[int, int]
"""Positions from the first number to right before the second."""


@dataclass(frozen=True)
class Spans:
    """Positions of a row's own tokens, pads not counted, over the whole conversation.

    Attributes:
        parts: half-open spans, ascending; none touches another.
    """

    parts: tuple[Span, ...]

    @classmethod
    def of(cls, argument: str, given: object) -> Self:
        """The spans that a user has given, merged where they overlap or touch."""
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise InvalidTypeError(
                f"{argument}: expected pairs of positions, got {given!r} of type "
                f"{type(given).__name__}; pass for instance [(0, 20)]"
            )
        merged: list[Span] = []
        for start, stop in sorted(require_span(argument, span) for span in given):
            if merged and start <= merged[-1][1]:
                start, stop = merged[-1][0], max(merged.pop()[1], stop)
            merged.append((start, stop))
        return cls(tuple(merged))

    def union(self, other: "Spans") -> "Spans":
        """What either of them covers."""
        return Spans.of("spans", self.parts + other.parts)

    def overlap(self, other: "Spans") -> "Spans":
        """What both of them cover."""
        return self.without(self.without(other))

    def without(self, other: "Spans") -> "Spans":
        """What this one covers and the other does not, in time linear in their parts."""
        left: list[Span] = []
        gone = deque(other.parts)
        for start, stop in self.parts:
            while gone and gone[0][0] < stop:
                begin, end = gone[0]
                left.append((start, begin))
                start = max(start, end)
                if end > stop:  # it may reach into the next part
                    break
                gone.popleft()
            left.append((start, stop))
        return Spans(tuple(part for part in left if part[0] < part[1]))

    @property
    def tokens(self) -> int:
        """How many positions they cover."""
        return sum(stop - start for start, stop in self.parts)

    def among_first(self, tokens: int) -> int:
        """How many of the first positions they cover."""
        return sum(max(0, min(stop, tokens) - start) for start, stop in self.parts)

    def cover(self, positions: Tensor) -> Tensor:
        """Return which positions lie in a span; the work does not grow with the number of spans.

        Args:
            positions: whole numbers of any shape; negative ones, such as those of padding, lie in
                no span.

        Returns:
            Bool of the same shape.
        """
        # The bounds ascend (start, stop, start, ...), so a position lies in a span if an odd number
        # of them is at or below it.
        bounds = on_device([bound for part in self.parts for bound in part], positions.device)
        passed = torch.searchsorted(bounds, positions.long().contiguous(), right=True)
        return passed % 2 == 1


def require_span(argument: str, span: Any) -> Span:
    """A pair of positions, the first below the second."""
    if not isinstance(span, tuple | list) or len(span) != 2:
        raise InvalidTypeError(
            f"{argument}: expected pairs of positions, got {span!r} of type {type(span).__name__} "
            "among them; pass for instance (0, 20) for the first twenty tokens"
        )
    start, stop = (require_int(argument, each, minimum=0) for each in span)
    if start >= stop:
        raise InvalidArgumentError(
            f"{argument}: expected a start below its stop, got ({start}, {stop}), which holds no "
            "position; the stop is the position after the last one"
        )
    return start, stop


def require_room(policy: str, tokens: int, room: int, place: str) -> None:
    """Raise unless a method has room for so many protected tokens; `place` says where it is."""
    if tokens > room:
        raise InvalidArgumentError(
            f"protect: expected at most {room:,} tokens, what {policy} has room for {place}, got "
            f"{tokens:,}; raise the budget, or protect fewer"
        )
