"""Ten questions about one real document: how do these of its sentences go on?

Nothing is hidden in the text. Sentences are taken from ten places of it; each question quotes the
first words of one, and the answer is what follows there. So any document makes questions whose
answers stand at known depths, and a model needs no knowledge but the text.
"""

import re
from dataclasses import dataclass
from typing import Any

_QUESTION = '\n\nThe text above says: "{start}'
_START_WORDS = 7
_LEAST_WORDS = 14
_ANSWER_TOKENS = 4
_CHARACTERS_PER_TOKEN = 8  # more than any long stretch of English needs


@dataclass(frozen=True, kw_only=True)
class Quote:
    """One question and its answer.

    Attributes:
        depth: where the sentence stands, as a fraction of the document.
        question_ids: what follows the document, up to where the answer begins.
        answer_ids: the next tokens of the sentence, four unless another number is asked for.
    """

    depth: float
    question_ids: list[int]
    answer_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class QuotedDocument:
    """A document and the questions about it.

    Attributes:
        ids: its tokens, exactly as many as asked for.
        quotes: from the beginning of it to its end.
    """

    ids: list[int]
    quotes: list[Quote]


def quoted_document(
    tokenizer: Any,
    text: str,
    *,
    tokens: int,
    questions: int = 10,
    answer_tokens: int = _ANSWER_TOKENS,
) -> QuotedDocument:
    """The first tokens of a text, and questions from evenly spaced places in them.

    Raises:
        ValueError: the text is too short, or has too few sentences to ask about.
    """
    plain = " ".join(text[: tokens * _CHARACTERS_PER_TOKEN].split())  # lines may break anywhere
    ids = _encode(tokenizer, plain)[:tokens]
    if len(ids) < tokens:
        raise ValueError(f"expected a text of {tokens} tokens, got {len(ids)}")
    read = tokenizer.decode(ids)
    candidates = [
        (match.start() / len(read), match.group())
        for match in re.finditer(r"(?<=[.?!]\s)[A-Z][^.?!\"]+[.?!]", read)
        if len(match.group().split()) >= _LEAST_WORDS
        and read.count(_first_words(match.group())) == 1
    ]
    quotes: list[Quote] = []
    for number in range(questions):
        if not candidates:
            raise ValueError(f"expected {questions} sentences to ask about, got {len(quotes)}")
        wanted = (number + 0.5) / questions
        nearest = min(candidates, key=lambda candidate: abs(candidate[0] - wanted))
        candidates.remove(nearest)
        quotes.append(_quote(tokenizer, *nearest, answer_tokens))
    return QuotedDocument(ids=ids, quotes=quotes)


def _quote(tokenizer: Any, depth: float, sentence: str, answer_tokens: int) -> Quote:
    start = _first_words(sentence)
    question = _encode(tokenizer, _QUESTION.format(start=start))
    answer = _encode(tokenizer, sentence[len(start) :])[:answer_tokens]
    return Quote(depth=round(depth, 3), question_ids=question, answer_ids=answer)


def _first_words(sentence: str) -> str:
    return " ".join(sentence.split(" ")[:_START_WORDS])


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids
