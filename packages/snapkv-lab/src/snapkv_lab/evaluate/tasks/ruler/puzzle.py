"""What every generator of RULER takes and gives."""

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which puzzle is wanted.

    Attributes:
        length: tokens that it is for; some generators are easier below 4096.
        index: which of the puzzles of that length.
        seed: what is drawn is drawn from it; another one for every puzzle.
        essay: the words of a long text to hide something in.
    """

    length: int
    index: int
    seed: str
    essay: tuple[str, ...]

    def draw(self) -> random.Random:
        """The same stream of draws each time."""
        return random.Random(self.seed)


@dataclass(frozen=True, kw_only=True)
class Puzzle:
    """A prompt in its parts, and what the answer must hold.

    Attributes:
        context: instructions and the long text.
        question: what stands behind it.
        answer_start: what the answer begins with.
        references: texts that the answer must hold.
    """

    context: str
    question: str
    answer_start: str
    references: tuple[str, ...]


class Generator(ABC):
    """Makes the puzzles of one task, of any size.

    Attributes:
        new_tokens: how long an answer may be.
        any_reference: whether one of the references is enough; otherwise the score is the
            fraction that is found.
    """

    new_tokens: ClassVar[int]
    any_reference: ClassVar[bool] = False

    @property
    def least(self) -> int:
        """The fewest parts that the long text can have."""
        return 1

    @property
    def most(self) -> int:
        """The most parts that it can have."""
        return 10_000_000

    @abstractmethod
    def puzzle(self, wanted: Wanted, parts: int) -> Puzzle:
        """A puzzle with that many parts; of another size, the same answer where possible."""
