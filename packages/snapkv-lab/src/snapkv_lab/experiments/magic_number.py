"""The retrieval task: one magic number hidden in a long text, asked for at its end.

The prompt ends with the start of the answer, so that a small model only has to copy the digits.
Each digit is one token in the demo model's tokenizer, so a method must keep a cluster of
neighbours to get the number right: this is what the paper's pooling is for (Fig. 8).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from snapkv.app.models import LoadedModel
from snapkv_lab.evaluate.haystack import Haystack, load_haystack

CITIES = (
    *("Athens", "Berlin", "Boston", "Cairo", "Chicago", "Dublin", "Lisbon", "London", "Madrid"),
    *("Moscow", "Oslo", "Paris", "Prague", "Rome", "Sydney", "Tokyo", "Toronto", "Vienna"),
)
DEPTHS = (0.1, 0.3, 0.5, 0.7)
SEED = 1

_NEEDLE = " Special magic number for {city} is {number}."
_QUESTION = (
    "\n\nQuestion: What is the special magic number for {city}?"
    "\nAnswer: The special magic number for {city} is"
)
_CHARACTERS_PER_TOKEN = 8  # more than any long stretch of English needs


@dataclass(frozen=True, kw_only=True)
class Document:
    """A prompt and the answer it asks for.

    Attributes:
        prompt_ids: token ids, exactly as many as asked for.
        question_ids: the end of the prompt: the question and the start of the answer.
        answer_ids: a space and one token per digit.
        city: whose number is hidden.
        number: four digits.
        depth: where the needle stands, as a fraction of the text.
    """

    prompt_ids: list[int]
    question_ids: list[int]
    answer_ids: list[int]
    city: str
    number: int
    depth: float


def make_documents(
    tokenizer: Any, haystack: Haystack, *, prompt_tokens: int, count: int, seed: int = SEED
) -> list[Document]:
    """Hide one number in each of `count` stretches of the haystack, at depths in turn."""
    return [
        _make_document(
            tokenizer,
            haystack.text,
            prompt_tokens=prompt_tokens,
            depth=DEPTHS[index % len(DEPTHS)],
            draw=random.Random(f"{seed}/{prompt_tokens}/{index}"),
        )
        for index in range(count)
    ]


def _make_document(
    tokenizer: Any, text: str, *, prompt_tokens: int, depth: float, draw: random.Random
) -> Document:
    city, number = draw.choice(CITIES), draw.randint(1000, 9999)
    needle = _encode(tokenizer, _NEEDLE.format(city=city, number=number))
    question = _encode(tokenizer, _QUESTION.format(city=city))
    hay_tokens = prompt_tokens - len(needle) - len(question)
    hay = stretch(tokenizer, text, hay_tokens, draw)
    split = _sentence_end(tokenizer, hay, int(depth * hay_tokens))
    return Document(
        prompt_ids=[*hay[:split], *needle, *hay[split:], *question],
        question_ids=question,
        answer_ids=_encode(tokenizer, f" {number}"),
        city=city,
        number=number,
        depth=depth,
    )


def stretch(tokenizer: Any, text: str, tokens: int, draw: random.Random) -> list[int]:
    """That many tokens of the text, from the start of a sentence."""
    characters = tokens * _CHARACTERS_PER_TOKEN
    start = text.index(". ", draw.randrange(len(text) - 2 * characters)) + 2
    ids = _encode(tokenizer, text[start : start + characters])
    if len(ids) < tokens:
        raise ValueError(f"expected {tokens} tokens in {characters} characters, got {len(ids)}")
    return ids[:tokens]


def _sentence_end(tokenizer: Any, ids: Sequence[int], near: int) -> int:
    """The last place at or before `near` where a sentence has just ended; 0 if there is none."""
    while near and not tokenizer.decode(ids[near - 1]).endswith((".", "?", "!")):
        near -= 1
    return near


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids


def prompt_of(loaded: LoadedModel, prompt_tokens: int) -> list[int]:
    """Token ids of that length."""
    document, *_ = make_documents(
        loaded.tokenizer, load_haystack(), prompt_tokens=prompt_tokens, count=1
    )
    return document.prompt_ids
