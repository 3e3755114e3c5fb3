"""Prompts that end in the start of a copy of something in them. Axes: T tokens, N copied ones."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LEAD = "\nThe secret code of the archive is"
_RIVAL = "\nThe secret code of the {name} is {digits}.\n"
_NAMES = ("library", "museum", "station", "castle", "harbour", "school", "hospital", "theatre")


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A prompt at whose end a copy of something in it begins, the copy, and its place."""

    prompt: list[int]
    answer: list[int]
    start: int

    @property
    def ids(self) -> Tensor:
        """(1, T + N - 1) int64: prompt and copy, without the last token, which asks for nothing."""
        return torch.tensor([self.prompt + self.answer[:-1]])

    @property
    def places(self) -> Tensor:
        """(N,) int64: where the tokens stand that are copied."""
        return torch.arange(self.start, self.start + len(self.answer))


def hidden_copy(
    tokenizer: Any, text: Sequence[int], *, kind: str, items: int, depth: float, seed: str
) -> Copy:
    """Hide something in a text, and begin to say it behind the text.

    `kind` is "digits", "words" of the text, or "tokens" of it; `depth` is from 0 to 1.
    """
    draw = random.Random(seed)
    answer = _drawn(tokenizer, text, kind, items, draw)
    begin = [own for own in _ids(tokenizer, "", special=True) if own == tokenizer.bos_token_id]
    lead, end = _ids(tokenizer, _LEAD), _ids(tokenizer, ".\n")
    place = int(depth * len(text))
    before = [*begin, *text[:place], *lead]
    prompt = [*before, *answer, *end, *text[place:], *_ids(tokenizer, "\n"), *lead]
    return Copy(prompt=prompt, answer=answer, start=len(before))


def with_rivals(
    tokenizer: Any, text: Sequence[int], *, count: int, digits: int, seed: str
) -> list[int]:
    """A text with codes of other places in it, evenly spread, which nobody asks for."""
    draw, found = random.Random(seed), list(text)
    for number in reversed(range(count)):
        name, again = _NAMES[number % len(_NAMES)], number // len(_NAMES)
        code = "".join(draw.choices("0123456789", k=digits))
        rival = _RIVAL.format(name=f"{name} {again + 1}" if again else name, digits=code)
        place = len(text) * (number + 1) // (count + 1)
        found[place:place] = _ids(tokenizer, rival)
    return found


def _drawn(
    tokenizer: Any, text: Sequence[int], kind: str, items: int, draw: random.Random
) -> list[int]:
    if kind == "tokens":
        return draw.choices(text, k=items)
    if kind == "digits":
        return _ids(tokenizer, " " + "".join(draw.choices("0123456789", k=items)))
    words = sorted(set(re.findall(r"[A-Za-z]{4,}", tokenizer.decode(list(text)))))
    return _ids(tokenizer, " " + " ".join(draw.choices(words or ["code"], k=items)))


def _ids(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return found
