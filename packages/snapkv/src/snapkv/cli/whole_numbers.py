"""Options that take a whole number as people write it, and what is checked of it."""

from dataclasses import dataclass
from typing import Any

from snapkv.cli.amounts import count, token_budget
from snapkv.validation import require_at_least, require_int


@dataclass(frozen=True)
class WholeNumber:
    """Marks an option that takes a whole number as people write it, such as 4k.

    Every such option has one in the end; who declares it sets what is checked before the command.

    Attributes:
        least: the smallest number; None leaves that to the command.
        is_counted: whether so many things are made, read or repeated, which is never beyond reason.
    """

    least: int | None = None
    is_counted: bool = True

    def read(self, name: str, text: str) -> int:
        """The number that the text stands for; an InvalidArgumentError if it is none or small."""
        number = count(name, text)
        if self.least is not None:
            check = require_at_least if self.is_counted else require_int
            check(name, number, self.least)
        return number


POSITIVE = WholeNumber(1, is_counted=False)


class TokenBudget(WholeNumber):
    """Marks an option that takes a number of tokens, or auto."""

    def read(self, name: str, text: str) -> Any:
        """What a policy takes as its budget."""
        del name
        return token_budget(text)
