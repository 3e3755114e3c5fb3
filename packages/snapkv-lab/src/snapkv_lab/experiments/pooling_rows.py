"""The rows of the study of pooling, and the counts that pages are made of."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from snapkv_lab.experiments.records import Row

COLUMNS = (
    *("share", "budget", "window", "pooling", "right", "nll"),
    *("lost_mean", "lost_layer", "lost_head"),
    *("lost_mean_beyond", "lost_layer_beyond", "lost_head_beyond"),
)
"""What the values of an answer are, in a row's "answers"."""

Setting = tuple[int, str]
"""A window and a pooling."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one setting answered to one question at one budget.

    Attributes:
        part: of the study.
        group: of questions.
        question: a name, the same for all settings.
        share: the budget is the prompt's tokens divided by it.
        setting: window and pooling.
        counted: of the parts of the answer that the full cache has right, which are right here.
        above: nll per answer token after the first, above the full cache's; None where the answer
            has one token.
        lost: six shares of the votes' mass that was not kept, in the order of `COLUMNS`.
    """

    part: str
    group: str
    question: str
    share: int
    setting: Setting
    counted: Sequence[int]
    above: float | None
    lost: Sequence[float]


def answers_of(rows: Iterable[Row]) -> Iterator[Answer]:
    """All answers of all rows."""
    for row in rows:
        full = row.get("full", {})
        for share, _, window, pooling, right, nll, *lost in row.get("answers", ()):
            unknown = nll is None or full["nll"] is None
            yield Answer(
                part=row["part"],
                group=row["group"],
                question=f"{row['text']}/{row['question']}",
                share=share,
                setting=(window, pooling),
                counted=[own for own, whole in zip(right, full["right"], strict=True) if whole],
                above=None if unknown else nll - full["nll"],
                lost=lost,
            )


@dataclass(frozen=True, kw_only=True)
class Count:
    """How many of how many."""

    right: int
    of: int

    @property
    def share(self) -> float:
        """As a fraction; 0 of none."""
        return self.right / self.of if self.of else 0.0

    def interval(self) -> tuple[float, float]:
        """Wilson's interval at 95 percent; all there is for none."""
        if not self.of:
            return 0.0, 1.0
        z = 1.96
        centre = self.share + z * z / (2 * self.of)
        spread = self.share * (1 - self.share) / self.of + z * z / (4 * self.of**2)
        scale = 1 + z * z / self.of
        low, high = (centre + sign * z * math.sqrt(spread) for sign in (-1, 1))
        return max(low / scale, 0.0), min(high / scale, 1.0)

    def __str__(self) -> str:
        """Such as "0.50 of 10 (0.24 to 0.76)"."""
        low, high = self.interval()
        return f"{self.share:.2f} of {self.of} ({low:.2f} to {high:.2f})"


def counted(rights: Iterable[int]) -> Count:
    """How many of some answers are right."""
    known = list(rights)
    return Count(right=sum(known), of=len(known))


def count(answers: Iterable[Answer]) -> Count:
    """How many parts are right of those that the full cache has right."""
    return counted(right for answer in answers for right in answer.counted)


def loss_above_full(answers: Iterable[Answer]) -> float | None:
    """Mean nll per token beyond that of the full cache; None where no answer has one."""
    above = [answer.above for answer in answers if answer.above is not None]
    return fmean(above) if above else None


def paired(answers: Sequence[Answer], one: Setting, other: Setting) -> tuple[int, int]:
    """Parts that the full cache has right and only `one` has right, and only `other`."""
    found: dict[tuple[int, str], dict[Setting, Sequence[int]]] = {}
    for answer in answers:
        found.setdefault((answer.share, answer.question), {})[answer.setting] = answer.counted
    pairs = [
        pair
        for own in found.values()
        if one in own and other in own
        for pair in zip(own[one], own[other], strict=True)
    ]
    return sum(a > b for a, b in pairs), sum(b > a for a, b in pairs)
