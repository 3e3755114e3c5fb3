"""The prompts of experiments that read each prompt once.

The magic number is hidden in a long text and asked for at its end. The prompt ends with the
beginning of the answer, so that a small model only has to copy the digits. Each digit is one token
of the demo model's tokenizer, so a method must keep a cluster of neighbouring tokens to answer:
this is what the paper's pooling is for (Fig. 8).

Quotations are sentences from evenly spaced places of any text, whose beginning is quoted and which
the model continues.
"""

import random
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snapkv import CompressedCache
from snapkv.hf.cache_argument import passed
from snapkv.kvzip import instruction_of
from snapkv.policies import Policy
from snapkv_app.observing import RecordedPrompt, RecordingPolicy, record_prompt, record_prompt_twice
from snapkv_lab.evaluate.haystack import CHARACTERS_PER_TOKEN, CITIES, load_haystack, token_ids
from snapkv_lab.measure.contenders import generate_tokens

DEPTHS = (0.1, 0.3, 0.5, 0.7)
SEED = 1

_NEEDLE = " Special magic number for {city} is {number}."
_QUESTION = (
    "\n\nQuestion: What is the special magic number for {city}?"
    "\nAnswer: The special magic number for {city} is"
)


class NeedlePrompt(NamedTuple):
    """The token ids of a prompt with the requested length, and of the right answer to it."""

    prompt_ids: list[int]
    answer_ids: list[int]


def make_documents(tokenizer: Any, *, prompt_tokens: int, count: int = 1) -> list[NeedlePrompt]:
    """Return `count` prompts of `prompt_tokens` tokens, in each of which a number is hidden.

    The depth of the number differs from prompt to prompt. Equal arguments give equal prompts.
    """
    text = load_haystack().text
    return [_make_document(tokenizer, text, prompt_tokens, index) for index in range(count)]


def _make_document(tokenizer: Any, text: str, prompt_tokens: int, index: int) -> NeedlePrompt:
    """Return a prompt with a number that is hidden in a part of a text, after a sentence near one
    of `DEPTHS`.

    Args:
        tokenizer: the tokenizer of the model.
        text: the text, from which a random part is taken.
        prompt_tokens: the length of the prompt.
        index: the number of the prompt. Equal arguments give equal prompts.

    Raises:
        ValueError: the text is too short.
    """
    draw = random.Random(f"{SEED}/{prompt_tokens}/{index}")
    city, number = draw.choice(CITIES), draw.randint(1000, 9999)
    needle = token_ids(tokenizer, _NEEDLE.format(city=city, number=number))
    question = token_ids(tokenizer, _QUESTION.format(city=city))
    hay = cut_stretch(tokenizer, text, prompt_tokens - len(needle) - len(question), draw)
    split = int(DEPTHS[index % len(DEPTHS)] * len(hay))
    while split and not tokenizer.decode(hay[split - 1]).endswith((".", "?", "!")):
        split -= 1  # back to the end of a sentence
    ids = [*hay[:split], *needle, *hay[split:], *question]
    return NeedlePrompt(ids, token_ids(tokenizer, f" {number}"))


def cut_stretch(tokenizer: Any, text: str, tokens: int, draw: random.Random) -> list[int]:
    """Return the token ids of a random part of the text with exactly `tokens` tokens.

    It starts at the beginning of a sentence.

    Raises:
        ValueError: the text has at most 16 characters per token that is asked for, or no sentence
            begins after the random place.
    """
    characters = tokens * CHARACTERS_PER_TOKEN
    start = text.index(". ", draw.randrange(len(text) - 2 * characters)) + 2
    ids = token_ids(tokenizer, text[start : start + characters])
    assert len(ids) >= tokens
    return ids[:tokens]


class Quote(NamedTuple):
    """A question that quotes the beginning of a sentence, and the tokens that continue it.

    `depth` is the place of the sentence, as a fraction of its document.
    """

    depth: float
    question_ids: list[int]
    answer_ids: list[int]


class QuotedDocument(NamedTuple):
    """A document of exactly the requested length, and the questions about it in order."""

    ids: list[int]
    quotes: list[Quote]


_START_WORDS, _LEAST_WORDS = 7, 14


def quoted_document(
    tokenizer: Any, text: str, *, tokens: int, questions: int = 10, answer_tokens: int = 4
) -> QuotedDocument:
    """Return the first tokens of a text, and questions about evenly spaced sentences in them.

    Args:
        tokenizer: the tokenizer of the model.
        text: the text; its lines are joined.
        tokens: the length of the document.
        questions: how many sentences are asked about.
        answer_tokens: how many tokens of a sentence are the answer, at most.

    Raises:
        ValueError: the text is too short, or has too few sentences to ask about.
    """
    plain = " ".join(text[: tokens * CHARACTERS_PER_TOKEN].split())  # joins lines
    ids = token_ids(tokenizer, plain)[:tokens]
    if len(ids) < tokens:
        raise ValueError(f"expected a text of {tokens} tokens, but got {len(ids)}")
    read = tokenizer.decode(ids)
    candidates = [
        (match.start() / len(read), match.group())
        for match in re.finditer(r"(?<=[.?!]\s)[A-Z][^.?!\"]+[.?!]", read)
        if len(match.group().split()) >= _LEAST_WORDS
        and read.count(_first_words(match.group())) == 1
    ]
    if len(candidates) < questions:
        raise ValueError(f"expected {questions} sentences to ask about, but got {len(candidates)}")
    quotes = []
    for depth_wanted in ((number + 0.5) / questions for number in range(questions)):
        nearest = min(candidates, key=lambda candidate: abs(candidate[0] - depth_wanted))
        candidates.remove(nearest)
        depth, sentence = nearest
        start = _first_words(sentence)
        question = token_ids(tokenizer, f'\n\nThe text above says: "{start}')
        answer = token_ids(tokenizer, sentence[len(start) :])[:answer_tokens]
        quotes.append(Quote(round(depth, 3), question, answer))
    return QuotedDocument(ids, quotes)


def _first_words(sentence: str) -> str:
    return " ".join(sentence.split(" ")[:_START_WORDS])


def _tensor(model: Any, ids: Sequence[int]) -> Tensor:
    return torch.tensor([list(ids)], device=model.device)


def read_prompt(
    model: Any, prompt_ids: Sequence[int], *, recorded_queries: int = 64
) -> RecordedPrompt:
    """Read a prompt with the full cache, and return what was recorded in each layer, with the
    queries of only the last `recorded_queries` tokens.
    """
    recorder = RecordingPolicy(recorded_queries=recorded_queries)
    return record_prompt(model, _tensor(model, prompt_ids), recorder)


def read_prompt_twice(
    model: Any, tokenizer: Any, prompt_ids: Sequence[int], policy: Policy
) -> RecordedPrompt:
    """Read a prompt and let the model repeat it, for a policy that needs a second reading, and
    return what was recorded in each layer.
    """
    ids, instruction = _tensor(model, prompt_ids), instruction_of(tokenizer)
    return record_prompt_twice(model, ids, policy, instruction_ids=instruction)


def greedy_decoder(prompt: RecordedPrompt, cache: CompressedCache) -> Callable[[], None]:
    """Return a function that runs a decode step each time it is called.

    A step reads the token that was most likely before, first the one after the prompt, into
    `cache`. The function returns nothing.
    """
    token: Tensor = prompt.last_logits[:, -1:].argmax(dim=-1)

    def step() -> None:
        nonlocal token
        cache.expect_tokens(token)
        token = prompt.model(token, **passed(cache)).logits[:, -1:].argmax(dim=-1)

    return step


def generate_greedily(model: Any, ids: Sequence[int], cache: Any, tokens: int) -> list[int]:
    """Generate exactly `tokens` greedy tokens after a prompt, and return their ids.

    The cache is empty or has read a beginning of the prompt without its last token. It grows in
    place.
    """
    generated = generate_tokens(model, _tensor(model, ids), cache, tokens)
    return generated[0, len(ids) :].tolist()
