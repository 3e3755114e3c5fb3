"""Needle in a haystack: one sentence hidden in a long text, at every length and depth.

The construction of the public test (Kamradt 2023): the text is cut to the length less a buffer for
the question, and the needle stands behind the last sentence that ends before its depth. The magic
number is the form of the Large World Model's evaluation, which the paper's Fig. 6 is of.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from snapkv.app.settings import GenerationSettings
from snapkv.errors import InvalidArgumentError
from snapkv.validation import require_int
from snapkv_lab.evaluate.haystack import (
    CHARACTERS_PER_TOKEN,
    CITIES,
    Haystack,
    HaystackTask,
    encode,
    number,
)
from snapkv_lab.evaluate.sample import Sample
from snapkv_lab.evaluate.task import percents

_INSTRUCTION = (
    "You are a helpful assistant that answers questions about a document. Keep the answer short "
    "and direct.\n\n"
)
_RESTRICTION = " Don't give information outside the document or repeat your findings."
_SENTENCE_ENDS = (".", "?", "!", "。", "？", "！")  # noqa: RUF001 - Chinese has its own marks
_MOST_DEPTHS = 101
_MOST_DIGITS = 1000


@dataclass(frozen=True, kw_only=True)
class Needle(HaystackTask):
    """One sentence hidden in a long text, asked for at every length and depth.

    Args:
        lengths: tokens of the whole prompt, question and instructions included, about.
        depths: how many places from the beginning (0) to the end (100 percent) of the text.
        digits: of the magic number.
        permutations: runs of every length and depth, each with the documents in another order.
        cloze: begin the answer for the model, which small models need.
        buffer_tokens: how much of a length is left for question and instructions.
        seed: of cities, numbers and orders.
    """

    name: ClassVar[str] = "needle"
    metric: ClassVar[str] = "accuracy"
    axes: ClassVar[tuple[str, ...]] = ("length", "depth")

    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    depths: int = 5
    digits: int = 7
    permutations: int = 1
    haystack: str | None = None
    cloze: bool = False
    buffer_tokens: int = 200
    seed: int = 42

    def __post_init__(self) -> None:
        self.require(depths=1, permutations=1, buffer_tokens=0)
        if self.depths > _MOST_DEPTHS:
            raise InvalidArgumentError(
                f"depths: expected at most {_MOST_DEPTHS}, one for every whole percent, got "
                f"{self.depths}; pass a smaller number"
            )
        require_int("digits", self.digits, minimum=1, maximum=_MOST_DIGITS)
        self.require(lengths=self.buffer_tokens + 100)
        self.text  # noqa: B018 # read now: a folder without text is refused

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        for length, depth, order in itertools.product(
            self.lengths, percents(self.depths), range(self.permutations)
        ):
            yield self._sample(tokenizer, length, depth, order)

    def score(self, sample: Sample, prediction: str) -> float:
        """Whether the number is in the answer."""
        return float(sample.references[0] in prediction)

    def _sample(self, tokenizer: Any, length: int, depth: int, order: int) -> Sample:
        name = f"{length}/{depth}/{order}"
        draw = random.Random(f"{self.seed}/{name}")
        city, answer = draw.choice(CITIES), number(draw, self.digits)
        text = self.text.permuted(f"{self.seed}/{name}") if self.permutations > 1 else self.text
        start = f"The special magic {city} number is:"
        needle, question = f"\n{start} {answer}\n", f"What is the special magic {city} number?"
        tokens = length - self.buffer_tokens
        ids = _with_needle(tokenizer, text, needle, tokens=tokens, depth=depth)
        return Sample(
            name=name,
            cell={"length": length, "depth": depth},
            context=_INSTRUCTION + tokenizer.decode(ids, skip_special_tokens=True),
            question=f"\n\n{question}{_RESTRICTION}",
            plain_question=f"\n\nQuestion: {question}\nAnswer:",
            answer_start=start if self.cloze else "",
            references=(answer,),
            settings=GenerationSettings(max_new_tokens=self.digits + (5 if self.cloze else 25)),
        )


def _with_needle(
    tokenizer: Any, text: Haystack, needle: str, *, tokens: int, depth: int
) -> list[int]:
    """That many tokens of the text, repeated where it is too short, with the needle in them."""
    inserted = encode(tokenizer, needle)
    ids = _beginning(tokenizer, text, tokens - len(inserted))
    place = _sentence_end(tokenizer, ids, int(len(ids) * depth / 100)) if depth < 100 else len(ids)
    return [*ids[:place], *inserted, *ids[place:]]


def _beginning(tokenizer: Any, text: Haystack, tokens: int) -> list[int]:
    """The first tokens of the text, which begins anew where it is too short."""
    if tokens < 1:
        raise InvalidArgumentError(
            "lengths: expected room for some text beside the needle, got none; pass larger lengths"
        )
    whole, characters = text.text, tokens * CHARACTERS_PER_TOKEN
    while True:
        ids = encode(tokenizer, (whole * (1 + characters // len(whole)))[:characters])
        if len(ids) >= tokens:
            return ids[:tokens]
        if not ids:
            raise InvalidArgumentError(
                f"haystack: expected text that the model's tokenizer knows, got no token of "
                f"{text.name}; choose another folder"
            )
        characters *= 2


def _sentence_end(tokenizer: Any, ids: list[int], most: int) -> int:
    """The last place, at most so far on, behind a sentence's end, or the text's beginning.

    In a text without sentences, so far on.
    """

    def ended(place: int) -> bool:
        text: str = tokenizer.decode(ids[place - 1])
        return text.rstrip().endswith(_SENTENCE_ENDS)

    if before := next(filter(ended, range(most, 0, -1)), 0):
        return before
    return 0 if any(map(ended, range(most + 1, len(ids) + 1))) else most
