"""RULER's vt: a value handed on from variable to variable, told in the middle of noise."""

import itertools
import random
import string
from dataclasses import dataclass
from typing import ClassVar

from snapkv_lab.evaluate.tasks.ruler.needle import NOISE
from snapkv_lab.evaluate.tasks.ruler.puzzle import Generator, Puzzle, Wanted
from snapkv_lab.evaluate.words import distinct

_EXAMPLE_NOISES = 10  # what the official fit of the example to 500 tokens gives


@dataclass(frozen=True, kw_only=True)
class Tracing(Generator):
    """One chain of assignments, behind a worked example with shorter names.

    A part of the text is a repetition of the noise.

    Args:
        hops: assignments after the first.
    """

    new_tokens: ClassVar[int] = 30

    hops: int = 4

    @property
    def least(self) -> int:
        """One more than there are assignments, as the official suite has it."""
        return self.hops + 2

    def puzzle(self, wanted: Wanted, parts: int) -> Puzzle:
        """A chain in that many lines of noise."""
        draw = wanted.draw()
        example = self._chain(draw, _EXAMPLE_NOISES, letters=3)
        asked = self._chain(draw, parts, letters=5)
        solved = f"{example.context}{example.question} {example.answer_start}"
        return Puzzle(
            context=f"{solved} {' '.join(example.references)}\n\n\n\n{asked.context}",
            question=asked.question,
            answer_start=asked.answer_start,
            references=asked.references,
        )

    def _chain(self, draw: random.Random, noises: int, *, letters: int) -> Puzzle:
        names = distinct(
            lambda: "".join(draw.choices(string.ascii_uppercase, k=letters)), self.hops + 1
        )
        value = draw.randrange(10_000, 99_999)
        steps = [f"VAR {names[0]} = {value}"]
        steps += [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(names)]
        lines = [f"{NOISE}\n"] * noises
        places = sorted(draw.sample(range(noises), len(steps)))
        for earlier, (place, step) in enumerate(zip(places, steps, strict=True)):
            lines.insert(place + earlier, step)
        return Puzzle(
            context="Memorize and track the chain(s) of variable assignment hidden in the "
            f"following text.\n\n{' '.join(lines)}",
            question=f"\nQuestion: Find all variables that are assigned the value {value} in the "
            "text above.",
            answer_start="Answer: According to the chain(s) of variable assignment in the text "
            f"above, {len(names)} variables are assigned the value {value}, they are: ",
            references=tuple(names),
        )
