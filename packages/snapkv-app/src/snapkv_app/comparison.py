"""Whether a compressed cache gave the full cache's answer, and where they differ."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from snapkv_app.answering import Answer


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A compressed answer and the full cache's."""

    same: bool
    first_difference: int | None

    @classmethod
    def of(cls, answer: Answer, full: Answer) -> Self:
        """Compare whole answers by their text."""
        if answer.text == full.text:
            return cls(same=True, first_difference=None)
        return cls.of_tokens(answer.token_ids, full.token_ids)

    @classmethod
    def of_tokens(cls, ours: Sequence[int], theirs: Sequence[int]) -> Self:
        pairs = itertools.zip_longest(ours, theirs)
        place = next((number for number, (a, b) in enumerate(pairs) if a != b), None)
        return cls(same=place is None, first_difference=place)

    @classmethod
    def of_first(cls, answer: Answer, full: Answer, tokens: int) -> Self:
        """Compare the first so many tokens, or all if an answer is shorter."""
        return cls.of_tokens(answer.token_ids[:tokens], full.token_ids[:tokens])
