"""What stands before and behind documents in a prompt: the chat template, or special tokens."""

import hashlib
import json
from typing import Any

from snapkv.errors import InvalidArgumentError

_DOCUMENTS = "the-documents-so-far"
_SAMPLE = "Question: 2 tokenizers, one text?\n\tÄ 你好 \U0001f600"


def prefix_ids(tokenizer: Any) -> list[int]:
    """The tokens before the first document.

    With a chat template all that it writes before the user's message; without one the special
    tokens that the tokenizer puts in front of a text.

    Raises:
        InvalidArgumentError: a chat template that does not repeat the message.
    """
    if tokenizer.chat_template:
        return _plain_ids(tokenizer, _around(tokenizer, "")[0])
    whole = tokenizer(_DOCUMENTS)["input_ids"]
    plain = _plain_ids(tokenizer, _DOCUMENTS)
    places = range(len(whole) - len(plain) + 1)
    first = next((place for place in places if whole[place : place + len(plain)] == plain), 0)
    return list(whole[:first])


def document_ids(tokenizer: Any, name: str, text: str) -> list[int]:
    """The tokens of a document: a line with its name, its text, and an empty line."""
    return _plain_ids(tokenizer, f"===== {name} =====\n{text}\n\n")


def question_ids(tokenizer: Any, question: str, answer_start: str = "") -> list[int]:
    """The tokens behind the last document, up to where the answer goes on.

    Raises:
        InvalidArgumentError: a chat template that does not repeat the message.
    """
    if tokenizer.chat_template:
        return _plain_ids(tokenizer, _around(tokenizer, question)[1] + answer_start)
    start = f" {answer_start}" if answer_start else ""
    return _plain_ids(tokenizer, f"Question: {question}\nAnswer:{start}")


def fingerprint(tokenizer: Any) -> str:
    """What tells a tokenizer and its template from others: SHA-256, in hexadecimal."""
    ids = _plain_ids(tokenizer, _SAMPLE)
    told = json.dumps([tokenizer.chat_template, len(tokenizer), ids], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


def _around(tokenizer: Any, question: str) -> tuple[str, str]:
    """What the chat template writes before the documents, and behind them with the question."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _DOCUMENTS + question}],
        tokenize=False,
        add_generation_prompt=True,
    )
    before, found, behind = text.partition(_DOCUMENTS)
    if not found:
        raise InvalidArgumentError(
            "tokenizer: expected a chat template that repeats what the user says, got one that "
            "does not; set tokenizer.chat_template to None, or to another template"
        )
    return before, behind


def _plain_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids
