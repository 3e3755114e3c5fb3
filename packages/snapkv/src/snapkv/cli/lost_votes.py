"""Lost votes in plain words: how much of what the window voted for was dropped, and how badly."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from snapkv.policies.budget import dilution

Word = Literal["safe", "doubtful", "lost"]

SAFE_BELOW = 0.00125
"""Where no more than this share of the window's attention is lost at one place, on average over
heads and layers, answers are those of the full cache but for few of a hundred: see
`docs/results.md`, which says how often each word was right. The share is that of a
prompt of 1,024 tokens; a longer one dilutes votes. The sum of what is lost says less: many small
votes may mean nothing, and one that is lost may be the answer."""

DOUBTFUL_BELOW = 0.008
"""From here on an answer is to be mistrusted; below it, and not safe, most are right."""


def word_for(peak: float, tokens: float) -> Word:
    """What the highest lost vote, 0 to 1, of so many tokens means for the answer.

    What is no number is lost.
    """
    undiluted = peak * dilution(tokens)
    if undiluted < SAFE_BELOW:
        return "safe"
    return "doubtful" if undiluted < DOUBTFUL_BELOW else "lost"


@dataclass(frozen=True, kw_only=True)
class LostInWords:
    """What a report of a cache says about the votes that were lost.

    Attributes:
        share: mean over layers and heads, 0 to 1; None where the method measures none.
        highest: that of the worst layer; None where there is none.
        peak: the highest vote that is lost, as a share of the window's attention, mean over layers
            and heads, see `CacheReport`; None where the method measures none.
        tokens: that were seen when the layers chose.
        drops_nothing: whether all of them are held.
    """

    share: float | None
    highest: float | None
    peak: float | None
    tokens: int
    drops_nothing: bool

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> Self:
        """Read a `CacheReport`, which need not know of votes."""
        layers = [row.get("lost_votes") for row in report.get("layers", ())]
        return cls(
            share=report.get("lost_votes"),
            highest=max((lost for lost in layers if lost is not None), default=None),
            peak=report.get("lost_vote_peak"),
            tokens=report.get("chosen_at", report["seen_tokens"]),
            drops_nothing=report["kept_tokens"] >= report["seen_tokens"],
        )

    @property
    def word(self) -> Word | None:
        """The plain word; None where nothing is known. Where nothing is dropped, it is "safe"."""
        if self.drops_nothing:
            return "safe"
        return None if self.peak is None else word_for(self.peak, self.tokens)

    @property
    def calls_for_more(self) -> bool:
        """Whether a larger budget is the next thing to try."""
        return self.word in ("doubtful", "lost")

    def __str__(self) -> str:
        if self.drops_nothing:
            return "nothing was dropped"
        return "-" if self.share is None else f"{100 * self.share:.0f} % ({self.word})"
