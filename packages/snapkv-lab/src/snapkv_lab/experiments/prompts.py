"""What models are asked, and how answers are scored: prompts that are read once.

The magic number: a number hidden in a long text and asked for at its end. The prompt ends with the
start of the answer, so that a small model only has to copy the digits. Each digit is one token in
the demo model's tokenizer, so a method must keep a cluster of neighbours to get the number right:
this is what the paper's pooling is for (Fig. 8).

Quotations: sentences from evenly spaced places of any text, each begun and to be continued.
"""

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from snapkv import CompressedCache
from snapkv.app.observing import RecordedPrompt, Recorder, record_prompt, record_prompt_twice
from snapkv.policies import EvictingPolicy, Policy
from snapkv.policies.kvzip import INSTRUCTION
from snapkv_lab.evaluate.haystack import Haystack
from snapkv_lab.experiments.records import Row

CITIES = (
    *("Athens", "Berlin", "Boston", "Cairo", "Chicago", "Dublin", "Lisbon", "London", "Madrid"),
    *("Moscow", "Oslo", "Paris", "Prague", "Rome", "Sydney", "Tokyo", "Toronto", "Vienna"),
)
DEPTHS = (0.1, 0.3, 0.5, 0.7)
SEED = 1
MOST_WINDOW_TOKENS = 64

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
    """

    prompt_ids: list[int]
    question_ids: list[int]
    answer_ids: list[int]
    city: str = ""
    number: int = 0


def make_documents(
    tokenizer: Any, haystack: Haystack, *, prompt_tokens: int, count: int
) -> list[Document]:
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
) -> Document:
    city, number = draw.choice(CITIES), draw.randint(1000, 9999)
    needle = encode(tokenizer, _NEEDLE.format(city=city, number=number))
    question = encode(tokenizer, _QUESTION.format(city=city))
    hay = stretch(tokenizer, text, prompt_tokens - len(needle) - len(question), draw)
    split = int(depth * len(hay))
    while split and not tokenizer.decode(hay[split - 1]).endswith((".", "?", "!")):
        split -= 1  # to where a sentence has just ended
    return Document(
        prompt_ids=[*hay[:split], *needle, *hay[split:], *question],
        question_ids=question,
        answer_ids=encode(tokenizer, f" {number}"),
        city=city,
        number=number,
    )


def stretch(tokenizer: Any, text: str, tokens: int, draw: random.Random) -> list[int]:
    """That many tokens of the text, from the start of a sentence."""
    characters = tokens * _CHARACTERS_PER_TOKEN
    start = text.index(". ", draw.randrange(len(text) - 2 * characters)) + 2
    ids = encode(tokenizer, text[start : start + characters])
    assert len(ids) >= tokens
    return ids[:tokens]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids without special tokens."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids


@dataclass(frozen=True, kw_only=True)
class Quote:
    """How does a sentence of a document go on?

    Attributes:
        depth: where the sentence stands, as a fraction of the document.
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
    plain = " ".join(text[: tokens * _CHARACTERS_PER_TOKEN].split())  # lines may break anywhere
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
    model: Any, prompt_ids: Sequence[int], *, recorded_queries: int = MOST_WINDOW_TOKENS
) -> RecordedPrompt:
    """Read one prompt with the full cache, recording it and its last queries."""
    ids = torch.tensor([list(prompt_ids)], device=model.device)
    return record_prompt(model, ids, Recorder(recorded_queries=recorded_queries))


def read_prompt_twice(
    model: Any, tokenizer: Any, prompt_ids: Sequence[int], policy: Policy
) -> RecordedPrompt:
    """Read one prompt and have the model repeat it, for policies like this one."""
    ids = torch.tensor([list(prompt_ids)], device=model.device)
    instruction = encode(tokenizer, INSTRUCTION)
    return record_prompt_twice(model, ids, policy, instruction_ids=instruction)


def decoder(prompt: RecordedPrompt, cache: CompressedCache) -> Callable[[], None]:
    """A function that decodes one greedy token behind a prompt."""
    token: Tensor = prompt.last_logits[:, -1:].argmax(dim=-1)

    def step() -> None:
        nonlocal token
        cache.expect_tokens(token)
        token = prompt.model(token, past_key_values=cache).logits[:, -1:].argmax(dim=-1)

    return step


def generate(model: Any, ids: Sequence[int], cache: Any, tokens: int) -> list[int]:
    """Exactly so many greedy tokens behind a prompt whose cache this is."""
    prompt = torch.tensor([list(ids)], device=model.device)
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=cache,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
    )
    said: list[int] = output[0, len(ids) :].tolist()
    return said


@dataclass(frozen=True, kw_only=True)
class Score:
    """One answer.

    Attributes:
        right: every token of the answer was the most likely one.
        nll: negative log-likelihood (nats) of the whole answer after its first token. Where the
            prompt ends in the question, the first token is predicted while the prompt is read,
            before anything is dropped.
    """

    right: bool
    nll: float


@torch.inference_mode()
def score_answer(
    prompt: RecordedPrompt,
    cache: CompressedCache,
    answer_ids: Sequence[int],
    *,
    question_ids: Sequence[int] = (),
) -> Score:
    """Score the answer behind a prompt whose cache this is; the answer is appended to it.

    A question that is not part of the prompt is read from the cache before the answer, in one
    pass, as `generate` reads it.
    """
    before = prompt.last_logits
    answer = torch.tensor(list(answer_ids), device=before.device)
    if question_ids:
        question = torch.tensor([list(question_ids)], device=answer.device)
        before = _read(prompt.model, cache, question)[:, -1:]
    one_by_one = isinstance(cache.policy, EvictingPolicy)
    parts = answer[None, :-1].split(1 if one_by_one else len(answer), dim=1)
    behind = torch.cat([_read(prompt.model, cache, part) for part in parts], dim=1)
    logits = torch.cat([before, behind], dim=1)[0]
    of_answer = logits.float().log_softmax(dim=-1).gather(1, answer[:, None])[:, 0]
    return Score(right=torch.equal(logits.argmax(dim=-1), answer), nll=-float(of_answer[1:].sum()))


def _read(model: Any, cache: CompressedCache, ids: Tensor) -> Tensor:
    """Logits (1, N, V) behind each of the tokens, which are read in one pass."""
    cache.expect_tokens(ids)
    logits: Tensor = model(ids, past_key_values=cache).logits
    return logits


def retrieved(
    model: Any,
    documents: Iterable[Document],
    policies: Sequence[Policy],
    *,
    hidden: bool = False,
    read: Callable[[Sequence[int]], RecordedPrompt] | None = None,
) -> list[Row]:
    """Answer every document from the cache of every policy; a row for each policy, in order.

    Bytes are those of keys and values, the mean over documents: "held_bytes" after what was
    compressed, "full_bytes" of the full cache then, "end_bytes" behind the answer.

    Args:
        model: the model.
        documents: what to read, all of one length.
        policies: the methods.
        hidden: compress the text before the question, which is then read from the compressed
            cache; else the whole prompt, which ends in the question.
        read: how; by default once, with the full cache.
    """
    recorded = max(MOST_WINDOW_TOKENS, *(policy.query_tokens for policy in policies))
    answers: list[list[tuple[Score, Any, Any]]] = [[] for _ in policies]
    for document in documents:
        question = document.question_ids if hidden else []
        ids = document.prompt_ids[: len(document.prompt_ids) - len(question)]
        prompt = read(ids) if read else read_prompt(model, ids, recorded_queries=recorded)
        for policy, of_policy in zip(policies, answers, strict=True):
            cache = prompt.compressed(policy)
            before = cache.report()
            score = score_answer(prompt, cache, document.answer_ids, question_ids=question)
            of_policy.append((score, before, cache.report()))
    return [
        {
            "documents": len(own),
            "accuracy": round(fmean(score.right for score, *_ in own), 4),
            "nll": round(fmean(score.nll for score, *_ in own), 4),
            "read_tokens": fmean(before.seen_tokens for _, before, _ in own),
            "held_bytes": round(fmean(before.held_bytes for _, before, _ in own)),
            "full_bytes": round(fmean(before.full_bytes for _, before, _ in own)),
            "end_bytes": round(fmean(after.held_bytes for *_, after in own)),
        }
        for own in answers
    ]
