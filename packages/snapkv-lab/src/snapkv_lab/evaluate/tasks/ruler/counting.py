"""RULER's cwe and fwe: which words of a long list appear most often."""

import math
import random
import string
from typing import ClassVar

from snapkv_lab.evaluate.tasks.ruler.puzzle import Generator, Puzzle, Wanted
from snapkv_lab.evaluate.words import distinct, words

_COMMON = 10
_SHORT = 4096  # tokens below which cwe repeats less


class CommonWords(Generator):
    """cwe: ten words appear more often than the rest of a numbered list.

    The worked example is part of the prompt, with its answers directly behind the colon, as in the
    official suite. A part of the text is a word, counted once.
    """

    new_tokens: ClassVar[int] = 120

    @property
    def least(self) -> int:
        """The common words and one more."""
        return _COMMON + 1

    @property
    def most(self) -> int:
        """The words that there are; a list does not grow beyond them."""
        return len(words("noun", "adjective", "verb"))

    def puzzle(self, wanted: Wanted, parts: int) -> Puzzle:
        """A list of that many different words, behind a short one that is solved."""
        draw = wanted.draw()
        if wanted.length < _SHORT:
            example = _listed(draw, 20, repeats=(3, 1))
            asked = _listed(draw, parts, repeats=(6, 1))
        else:
            example = _listed(draw, 40, repeats=(10, 3))
            asked = _listed(draw, parts, repeats=(30, 3))
        solved = f"{example.context}{example.question} {example.answer_start}"
        return Puzzle(
            context=f"{solved}{_numbered(example.references)}\n{asked.context}",
            question=asked.question,
            answer_start=asked.answer_start,
            references=asked.references,
        )


class FrequentWords(Generator):
    """fwe: coded words whose frequency falls with the square of their rank; dots are the first.

    A part of the text is a word, counted each time.
    """

    new_tokens: ClassVar[int] = 50

    @property
    def least(self) -> int:
        """From here on the fourth word always appears more often than the fifth."""
        return 80

    def puzzle(self, wanted: Wanted, parts: int) -> Puzzle:
        """A text of about that many words; dots, and the three words that are asked for, lead."""
        draw = wanted.draw()
        coded = distinct(
            lambda: "".join(draw.choices(string.ascii_lowercase, k=6)), wanted.length // 50
        )
        vocabulary = ["...", *coded[1:]]
        whole = math.pi**2 / 6  # what 1/1 + 1/4 + 1/9 ... add up to
        text = [
            word
            for rank, word in enumerate(vocabulary, 1)
            for _ in range(int(parts / (whole * rank**2)))
        ]
        draw.shuffle(text)
        return Puzzle(
            context="Read the following coded text and track the frequency of each coded word. "
            f"Find the three most frequently appeared coded words. {' '.join(text)}",
            question="\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
            "What are the three most frequently appeared words in the above coded text?",
            answer_start="Answer: According to the coded text above, the three most frequently "
            "appeared words are:",
            references=tuple(vocabulary[1:4]),
        )


def _listed(draw: random.Random, count: int, *, repeats: tuple[int, int]) -> Puzzle:
    """That many words; the common and the other ones appear as often as `repeats` says."""
    drawn = draw.sample(words("noun", "adjective", "verb"), count)
    common, others = drawn[:_COMMON], drawn[_COMMON:]
    entries = common * repeats[0] + others * repeats[1]
    draw.shuffle(entries)
    return Puzzle(
        context="Below is a numbered list of words. In these words, some appear more often than "
        f"others. Memorize the ones that appear most often.\n{_numbered(entries)}",
        question="\nQuestion: What are the 10 most common words in the above list?",
        answer_start="Answer: The top 10 words that appear most often in the list are:",
        references=tuple(common),
    )


def _numbered(entries: list[str] | tuple[str, ...]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(entries, 1))
