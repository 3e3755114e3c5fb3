"""Needle in a haystack: one sentence hidden in a long text, at every length and depth.

The construction is that of the public test (Kamradt 2023): the text is cut to the length minus a
buffer for the question, and the needle is inserted after the last sentence that ends before its
depth. The magic number is the form that the Large World Model's evaluation uses, which the paper's
Fig. 6 shows. The sentence about a sandwich is the first form of the test.
"""

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from snapkv.errors import wrong
from snapkv.validation import require_choice, require_int
from snapkv_app.settings import GenerationSettings
from snapkv_lab.evaluate.haystack import (
    CHARACTERS_PER_TOKEN,
    CITIES,
    Haystack,
    HaystackTask,
    draw_number,
    token_ids,
)
from snapkv_lab.evaluate.sample import Sample
from snapkv_lab.evaluate.task import even_percents

_INSTRUCTION = (
    "You are a helpful assistant that answers questions about a document. Keep the answer short "
    "and direct.\n\n"
)
_RESTRICTION = " Don't give information outside the document or repeat your findings."
_SENTENCE_ENDS = (".", "?", "!", "。", "？", "！")  # noqa: RUF001 - Chinese has its own marks
_MOST_DEPTHS = 101
_MOST_DIGITS = 1000


class _Hidden(NamedTuple):
    """The hidden needle, the question about it, and the beginning and the rest of its answer."""

    needle: str
    question: str
    answer_start: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Needle(HaystackTask):
    """One sentence hidden in a long text, asked for at every length and depth.

    Args:
        lengths: tokens of the whole prompt, question and instructions included, about.
        depths: how many places from the beginning (0) to the end (100 percent) of the text.
        variant: magic-number asks for a number, sandwich for the best thing to do in San Francisco.
        digits: digits of the magic number.
        permutations: runs of every length and depth, each with the documents in another order.
        cloze: begin the answer for the model, which small models need.
        buffer_tokens: how much of a length is left for question and instructions.
        seed: random seed for cities, numbers and orders.
    """

    name: ClassVar[str] = "needle"
    metric: ClassVar[str] = "accuracy"
    axes: ClassVar[tuple[str, ...]] = ("length", "depth")

    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    depths: int = 5
    variant: Literal["magic-number", "sandwich"] = "magic-number"
    digits: int = 7
    permutations: int = 1
    haystack: str | None = None
    cloze: bool = False
    buffer_tokens: int = 200
    seed: int = 42

    def __post_init__(self) -> None:
        """Check the settings, and read the haystack now, so that a missing folder is refused early.

        A warning about each file of the folder that is not read is written to standard error.

        Raises:
            InvalidArgumentError: a number or a word is out of range, or `lengths` is empty. A
                length must be at least `buffer_tokens` + 100.
            InvalidTypeError: a number is not an integer.
            DocumentError: the haystack is missing or holds no text.
        """
        self.require(depths=1, permutations=1, buffer_tokens=0)
        if self.depths > _MOST_DEPTHS:
            problem = (
                f"expected at most {_MOST_DEPTHS}, one per whole percent, but got {self.depths}"
            )
            raise wrong("depths", problem, "Use a smaller value")
        require_int("digits", self.digits, minimum=1, maximum=_MOST_DIGITS)
        self.require(lengths=self.buffer_tokens + 100)
        require_choice("variant", self.variant, ("magic-number", "sandwich"))
        self.text  # noqa: B018 # is read here

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        for length, depth, order in itertools.product(
            self.lengths, even_percents(self.depths), range(self.permutations)
        ):
            yield self._sample(tokenizer, length, depth, order)

    def score(self, sample: Sample, prediction: str) -> float:
        """Return the score of an answer, which is a number between 0 and 1.

        For the variant magic-number, it is 1 if the answer contains the number, and 0 if it does
        not. For sandwich, it is the share of the different words of the right answer that occur in
        the answer.
        """
        if self.variant == "magic-number":
            return float(sample.references[0] in prediction)
        right, predicted = (_words(text) for text in (sample.references[0], prediction))
        return len(right & predicted) / len(right)

    def _sample(self, tokenizer: Any, length: int, depth: int, order: int) -> Sample:
        """Return the sample for one place of the needle. Equal arguments give equal samples.

        Args:
            tokenizer: the tokenizer of the model.
            length: about how many tokens the prompt has.
            depth: where the needle is, in percent of the text.
            order: the number of the permutation.

        Raises:
            InvalidArgumentError: the length has no room for text, or the tokenizer knows no part of
                the text.
        """
        name = f"{length}/{depth}/{order}"
        hidden = self._hidden(random.Random(f"{self.seed}/{name}"))
        text = self.text.permute(f"{self.seed}/{name}") if self.permutations > 1 else self.text
        needle = token_ids(tokenizer, hidden.needle)
        ids = _cut_beginning(tokenizer, text, length - self.buffer_tokens - len(needle))
        place = len(ids)
        if depth < 100:
            place = _find_sentence_end(tokenizer, ids, int(len(ids) * depth / 100))
        ids[place:place] = needle
        tokens = 48 if self.variant == "sandwich" else self.digits + (5 if self.cloze else 25)
        return Sample(
            name=name,
            cell={"length": length, "depth": depth},
            context=_INSTRUCTION + tokenizer.decode(ids, skip_special_tokens=True),
            question=f"\n\n{hidden.question}{_RESTRICTION}",
            plain_question=f"\n\nQuestion: {hidden.question}\nAnswer:",
            answer_start=hidden.answer_start if self.cloze else "",
            references=(hidden.answer,),
            settings=GenerationSettings(max_new_tokens=tokens),
        )

    def _hidden(self, draw: random.Random) -> _Hidden:
        """Return the needle and the question about it: a magic number for a city, both drawn at
        random, or the sentence about the sandwich, which is always the same.
        """
        if self.variant == "sandwich":
            thing = "eat a sandwich and sit in Dolores Park on a sunny day."
            start = "The best thing to do in San Francisco is"
            question = "What is the best thing to do in San Francisco?"
            return _Hidden(f"\n{start} {thing}\n", question, start, thing)
        city = draw.choice(CITIES)
        answer = draw_number(draw, self.digits)
        start = f"The special magic {city} number is:"
        question = f"What is the special magic {city} number?"
        return _Hidden(f"\n{start} {answer}\n", question, start, answer)


def _cut_beginning(tokenizer: Any, text: Haystack, tokens: int) -> list[int]:
    """Return the ids of the first `tokens` tokens of the text, without special tokens. The text is
    repeated if it is too short.

    Raises:
        InvalidArgumentError: `tokens` is below 1, or the tokenizer makes no token of the text.
    """
    if tokens < 1:
        raise wrong(
            "lengths",
            "there is no space for a text in addition to the needle",
            "Use larger lengths",
        )
    source, characters = text.text, tokens * CHARACTERS_PER_TOKEN
    while True:
        ids = token_ids(tokenizer, (source * (1 + characters // len(source)))[:characters])
        if len(ids) >= tokens:
            return ids[:tokens]
        if not ids:
            problem = f"the tokenizer of the model does not make any tokens from {text.name}"
            raise wrong("haystack", problem, "Choose a different folder")
        characters *= 2


def _find_sentence_end(tokenizer: Any, ids: list[int], most: int) -> int:
    """Return how many of the first tokens end with the last sentence that is complete within the
    first `most`.

    Args:
        tokenizer: decodes single tokens. A sentence ends with a token whose text ends with a mark
            such as a full stop.
        ids: all token ids of the text.
        most: the largest result.

    Returns:
        The number of tokens. It is 0 if sentences only end after the first `most` tokens, and
        `most` if the text has no end of a sentence.
    """

    def ended(place: int) -> bool:
        text: str = tokenizer.decode(ids[place - 1])
        return text.rstrip().endswith(_SENTENCE_ENDS)

    if before := next(filter(ended, range(most, 0, -1)), 0):
        return before
    return 0 if any(map(ended, range(most + 1, len(ids) + 1))) else most


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))
