"""RULER's eight needle tasks: values hidden under keys in noise, essays, or among other needles."""

import random
import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from snapkv_lab.evaluate.tasks.ruler.puzzle import Generator, Puzzle, Wanted
from snapkv_lab.evaluate.words import distinct, identifier, number, word_key

Kind = Literal["words", "numbers", "uuids"]

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""The sentences that are repeated where the text shall say nothing."""

_DIGITS = 7
_DEPTHS = [round(100 * i / 39) for i in range(40)]  # percent of the sentences


@dataclass(frozen=True, kw_only=True)
class Needles(Generator):
    """Values hidden under keys.

    A part of the text is a word of the essay, a repetition of the noise, or another needle.

    Args:
        haystack: what the needles are hidden in.
        key: what the keys look like.
        value: what the values look like.
        keys: how many keys are hidden; as many as are asked for at least.
        values: how many values each key has.
        queries: how many keys are asked for.
    """

    new_tokens: ClassVar[int] = 128

    haystack: Literal["noise", "essay", "needles"]
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    @property
    def least(self) -> int:
        """As many as there are needles: each gets a place of its own."""
        return max(self.keys, self.queries) * self.values

    def puzzle(self, wanted: Wanted, parts: int) -> Puzzle:
        """Needles in a text of that many parts."""
        draw = wanted.draw()
        keys = distinct(lambda: _drawn(self.key, draw), max(self.keys, self.queries))
        values = {key: distinct(lambda: _drawn(self.value, draw), self.values) for key in keys}
        asked = draw.sample(keys, self.queries)
        needles = [self._needle(key, value) for key in keys for value in values[key]]
        draw.shuffle(needles)
        if self.haystack == "essay":
            text = _in_essay(wanted, parts, needles, draw)
        else:
            others = self._sentences(parts, keys, draw)
            places = sorted(draw.sample(range(len(others)), len(needles)), reverse=True)
            text = "\n".join(_inserted(others, needles, places))
        return self._worded(text, asked, tuple(value for key in asked for value in values[key]))

    def _sentences(self, parts: int, keys: list[str], draw: random.Random) -> list[str]:
        if self.haystack == "noise":
            return [NOISE] * parts
        others = distinct(lambda: _drawn(self.key, draw), parts, besides=keys)
        return [self._needle(key, _drawn(self.value, draw)) for key in others]

    def _needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self.value} for {key} is: {value}."

    def _worded(self, text: str, asked: list[str], references: tuple[str, ...]) -> Puzzle:
        """The published wording; in the singular where there is one value to find."""
        keys = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
        if len(references) == 1:
            kind, some, verb, ask = self.value.removesuffix("s"), "A", "is", "is"
        else:
            kind, some, verb, ask = self.value, "Some", "are", "are all"
        sought = f"the special magic {kind} for {keys} mentioned in the provided text"
        return Puzzle(
            context=f"{some} special magic {kind} {verb} hidden within the following text. Make "
            f"sure to memorize it. I will quiz you about the {kind} afterwards.\n{text}",
            question=f"\nWhat {ask} {sought}?",
            answer_start=f"T{sought[1:]} {verb}",
            references=references,
        )


def sentences(text: str) -> list[str]:
    """A text cut behind full stops, question and exclamation marks, closing quotes included.

    Abbreviations are cut too; the cuts only say where something can be inserted.
    """
    return re.split(r"(?<=[.!?])\s+|(?<=[.!?][\"')\]])\s+", text.strip())


def _drawn(kind: Kind, draw: random.Random) -> str:
    if kind == "numbers":
        return number(draw, _DIGITS)
    return word_key(draw) if kind == "words" else identifier(draw)


def _in_essay(wanted: Wanted, count: int, needles: list[str], draw: random.Random) -> str:
    """That many words, repeated where there are fewer, with needles between sentences."""
    times, rest = divmod(count, len(wanted.essay))
    whole = sentences(" ".join([*wanted.essay * times, *wanted.essay[:rest]]))
    depths = sorted(draw.sample(_DEPTHS, len(needles)), reverse=True)
    places = [int(len(whole) * depth / 100) for depth in depths]
    return " ".join(_inserted(whole, needles, places))


def _inserted(texts: list[str], needles: list[str], places: list[int]) -> list[str]:
    """The texts with a needle before each of those places, which must fall."""
    for place, needle in zip(places, needles, strict=True):
        texts.insert(place, needle)
    return texts
