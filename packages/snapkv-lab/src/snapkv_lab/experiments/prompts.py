"""What models are asked: prompts that are read once.

The magic number: a number hidden in a long text and asked for at its end. The prompt ends with the
start of the answer, so that a small model only has to copy the digits. Each digit is one token in
the demo model's tokenizer, so a method must keep a cluster of neighbours to get the number right:
this is what the paper's pooling is for (Fig. 8).

Quotations: sentences from evenly spaced places of any text, each begun and to be continued.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snapkv import CompressedCache
from snapkv.app.observing import RecordedPrompt, RecordingPolicy, record_prompt, record_prompt_twice
from snapkv.policies import Policy
from snapkv.policies.kvzip import INSTRUCTION
from snapkv_lab.evaluate.haystack import CHARACTERS_PER_TOKEN, CITIES, Haystack, encode

DEPTHS = (0.1, 0.3, 0.5, 0.7)
SEED = 1

_NEEDLE = " Special magic number for {city} is {number}."
_QUESTION = (
    "\n\nQuestion: What is the special magic number for {city}?"
    "\nAnswer: The special magic number for {city} is"
)


class NeedlePrompt(NamedTuple):
    """A prompt, of exactly as many tokens as asked for, and the digits that it asks for."""

    prompt_ids: list[int]
    answer_ids: list[int]


def make_documents(
    tokenizer: Any, haystack: Haystack, *, prompt_tokens: int, count: int
) -> list[NeedlePrompt]:
    """Hide one number in each of `count` stretches of the haystack, at depths in turn."""
    return [
        _make_document(
            tokenizer,
            haystack.text,
            prompt_tokens,
            depth=DEPTHS[index % len(DEPTHS)],
            draw=random.Random(f"{SEED}/{prompt_tokens}/{index}"),
        )
        for index in range(count)
    ]


def _make_document(
    tokenizer: Any, text: str, prompt_tokens: int, *, depth: float, draw: random.Random
) -> NeedlePrompt:
    city, number = draw.choice(CITIES), draw.randint(1000, 9999)
    needle = encode(tokenizer, _NEEDLE.format(city=city, number=number))
    question = encode(tokenizer, _QUESTION.format(city=city))
    hay = stretch(tokenizer, text, prompt_tokens - len(needle) - len(question), draw)
    split = int(depth * len(hay))
    while split and not tokenizer.decode(hay[split - 1]).endswith((".", "?", "!")):
        split -= 1  # to where a sentence has just ended
    ids = [*hay[:split], *needle, *hay[split:], *question]
    return NeedlePrompt(ids, encode(tokenizer, f" {number}"))


def stretch(tokenizer: Any, text: str, tokens: int, draw: random.Random) -> list[int]:
    """That many tokens of the text, from the start of a sentence."""
    characters = tokens * CHARACTERS_PER_TOKEN
    start = text.index(". ", draw.randrange(len(text) - 2 * characters)) + 2
    ids = encode(tokenizer, text[start : start + characters])
    assert len(ids) >= tokens
    return ids[:tokens]


@dataclass(frozen=True, kw_only=True)
class Quote:
    """How does a sentence of a document go on?

    Attributes:
        depth: where the sentence is, as a fraction of the document.
        question_ids: what follows the document, up to where the answer begins.
        answer_ids: the next tokens of the sentence.
    """

    depth: float
    question_ids: list[int]
    answer_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class QuotedDocument:
    """A document of exactly as many tokens as asked for, and the questions about it, in order."""

    ids: list[int]
    quotes: list[Quote]


_START_WORDS, _LEAST_WORDS = 7, 14


def quoted_document(
    tokenizer: Any, text: str, *, tokens: int, questions: int = 10, answer_tokens: int = 4
) -> QuotedDocument:
    """The first tokens of a text, and questions from evenly spaced places in them.

    Raises:
        ValueError: the text is too short, or has too few sentences to ask about.
    """
    plain = " ".join(text[: tokens * CHARACTERS_PER_TOKEN].split())  # lines may break anywhere
    ids = encode(tokenizer, plain)[:tokens]
    if len(ids) < tokens:
        raise ValueError(f"expected a text of {tokens} tokens, got {len(ids)}")
    read = tokenizer.decode(ids)
    candidates = [
        (match.start() / len(read), match.group())
        for match in re.finditer(r"(?<=[.?!]\s)[A-Z][^.?!\"]+[.?!]", read)
        if len(match.group().split()) >= _LEAST_WORDS
        and read.count(_first_words(match.group())) == 1
    ]
    if len(candidates) < questions:
        raise ValueError(f"expected {questions} sentences to ask about, got {len(candidates)}")
    quotes: list[Quote] = []
    for wanted in ((number + 0.5) / questions for number in range(questions)):
        nearest = min(candidates, key=lambda candidate: abs(candidate[0] - wanted))  # at once
        candidates.remove(nearest)
        quotes.append(_quote(tokenizer, *nearest, answer_tokens))
    return QuotedDocument(ids=ids, quotes=quotes)


def _quote(tokenizer: Any, depth: float, sentence: str, answer_tokens: int) -> Quote:
    start = _first_words(sentence)
    return Quote(
        depth=round(depth, 3),
        question_ids=encode(tokenizer, f'\n\nThe text above says: "{start}'),
        answer_ids=encode(tokenizer, sentence[len(start) :])[:answer_tokens],
    )


def _first_words(sentence: str) -> str:
    return " ".join(sentence.split(" ")[:_START_WORDS])


def read_prompt(
    model: Any, prompt_ids: Sequence[int], *, recorded_queries: int = 64
) -> RecordedPrompt:
    """Read one prompt with the full cache, recording it and its last queries."""
    ids = torch.tensor([list(prompt_ids)], device=model.device)
    return record_prompt(model, ids, RecordingPolicy(recorded_queries=recorded_queries))


def read_prompt_twice(
    model: Any, tokenizer: Any, prompt_ids: Sequence[int], policy: Policy
) -> RecordedPrompt:
    """Read one prompt and have the model repeat it, for policies like this one."""
    ids = torch.tensor([list(prompt_ids)], device=model.device)
    instruction = encode(tokenizer, INSTRUCTION)
    return record_prompt_twice(model, ids, policy, instruction_ids=instruction)


def decoder(prompt: RecordedPrompt, cache: CompressedCache) -> Callable[[], None]:
    """A function that decodes one greedy token after a prompt."""
    token: Tensor = prompt.last_logits[:, -1:].argmax(dim=-1)

    def step() -> None:
        nonlocal token
        cache.expect_tokens(token)
        token = prompt.model(token, past_key_values=cache).logits[:, -1:].argmax(dim=-1)

    return step


def generate(model: Any, ids: Sequence[int], cache: Any, tokens: int, **options: Any) -> list[int]:
    """Exactly so many greedy tokens after a prompt whose cache this is."""
    prompt = torch.tensor([list(ids)], device=model.device)
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=cache,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    said: list[int] = output[0, len(ids) :].tolist()
    return said
