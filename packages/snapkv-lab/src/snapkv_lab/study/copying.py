"""Prompts that end in the start of a copy of a number in them."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from snapkv_lab.evaluate.haystack import encode

_LEAD = "\nThe secret code of the archive is"
_RIVAL = "\nThe secret code of the {name} is {digits}.\n"
_NAMES = ("library", "museum", "station", "castle", "harbour", "school", "hospital", "theatre")


class Copy(NamedTuple):
    """A prompt at whose end a copy of a number in it begins, the copy, and its place."""

    prompt: list[int]
    answer: list[int]
    start: int

    @property
    def places(self) -> range:
        """Where the tokens are that are copied."""
        return range(self.start, self.start + len(self.answer))


def hidden_copy(
    tokenizer: Any, text: Sequence[int], *, digits: int, depth: float, seed: str
) -> Copy:
    """Hide a number in a text, at a depth from 0 to 1, and begin to say it after the text."""
    answer = encode(tokenizer, " " + _code(random.Random(seed), digits))
    begin = [own for own in tokenizer("")["input_ids"] if own == tokenizer.bos_token_id]
    lead, end = encode(tokenizer, _LEAD), encode(tokenizer, ".\n")
    place = int(depth * len(text))
    before = [*begin, *text[:place], *lead]
    prompt = [*before, *answer, *end, *text[place:], *encode(tokenizer, "\n"), *lead]
    return Copy(prompt=prompt, answer=answer, start=len(before))


def with_rivals(
    tokenizer: Any, text: Sequence[int], *, count: int, digits: int, seed: str
) -> list[int]:
    """A text with codes of other places in it, evenly spread, which nobody asks for."""
    draw, found = random.Random(seed), list(text)
    for number in reversed(range(count)):
        name, again = _NAMES[number % len(_NAMES)], number // len(_NAMES)
        named = f"{name} {again + 1}" if again else name
        rival = _RIVAL.format(name=named, digits=_code(draw, digits))
        place = len(text) * (number + 1) // (count + 1)
        found[place:place] = encode(tokenizer, rival)
    return found


def _code(draw: random.Random, digits: int) -> str:
    return "".join(draw.choices("0123456789", k=digits))
