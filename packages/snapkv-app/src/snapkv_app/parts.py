"""Find the parts of a conversation: the tokens of every role, and those of thinking."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from snapkv.errors import wrong
from snapkv.policies.spans import Span
from snapkv_app.prompts import Prompt
from snapkv_app.protection import tokens_of

ROLES = ("system", "user", "assistant", "tool", "document")
"""The kinds of parts; their order is saved in files. No part is a tool's result yet."""

MARKS = {
    "<think>": "</think>",  # Qwen 3, DeepSeek R1, GLM 4.5, EXAONE 4, and most others
    "[THINK]": "[/THINK]",  # Magistral
    "<thought>": "</thought>",  # EXAONE Deep
    "<seed:think>": "</seed:think>",  # Seed-OSS
    "<|START_THINKING|>": "<|END_THINKING|>",  # Command A
    "<|channel>thought": "<channel|>",  # Gemma 4
    "<|channel|>analysis<|message|>": "<|end|>",  # gpt-oss
    "◁think▷": "◁/think▷",  # Kimi
}
"""The marks before and after thinking, by model family."""

_NEXT_MESSAGE = "<|start|>assistant"
"""The beginning of an answer of gpt-oss after thinking."""

_MOST_BYTES = 4
"""The most bytes of a character in UTF-8; each may be in a token of its own."""

_THOUGHT = re.compile(
    "|".join(
        rf"{re.escape(begin)}.*?(?:{re.escape(end)}(?:{re.escape(_NEXT_MESSAGE)})?|\Z)"
        for begin, end in MARKS.items()
    ),
    re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class SpokenPart:
    """A part of a conversation: its role, and its tokens with those of the template around it."""

    role: str
    span: Span


def tokens_between(offsets: Sequence[Span], start: int, stop: int) -> Span:
    """Return the span of the tokens that end after `start`, and at or before `stop`.

    Args:
        offsets: the first character of every token, and the first character after it.
        start: the position of a character.
        stop: the position of a later character.

    Returns:
        The span of tokens; (0, 0) if there are none.
    """
    within = [place for place, (_, end) in enumerate(offsets) if start < end <= stop]
    return (within[0], within[-1] + 1) if within else (0, 0)


def generation_tokens(tokenizer: Any) -> int:
    """Return how many tokens a chat template writes after a message to begin an answer.

    0 if the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        return 0
    turns = [{"role": "user", "content": "What?"}]
    plain = tokenizer.apply_chat_template(turns, tokenize=False)
    begun = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return len(tokenizer(begun.removeprefix(plain), add_special_tokens=False)["input_ids"])


def question_parts(tokenizer: Any, prompt: Prompt, document: str) -> list[SpokenPart]:
    """Return the parts of the first prompt: the system message, the document and the question.

    Empty parts are left out, and so is a document that the template has rewritten, which then
    belongs to the question. If the tokenizer reports no offsets, the result is empty.

    Args:
        tokenizer: the tokenizer of the model.
        prompt: the prompt.
        document: the text of the document in the prompt; may be empty.

    Raises:
        InvalidArgumentError: the tokenizer turns ordinary words into control tokens.
    """
    if not getattr(tokenizer, "is_fast", False):
        return []
    offsets, own = (
        prompt.offsets(tokenizer, "document", "Use a fast tokenizer"),
        prompt.system_characters,
    )
    bounds = [("system", 0, own), ("user", own, len(prompt.text))]
    place = prompt.text.find(document, own) if document else -1
    if place >= 0:
        stop = place + len(document)
        bounds[1:] = [("document", place, stop), ("user", stop, len(prompt.text))]
    parts = (
        SpokenPart(role=role, span=tokens_between(offsets, start, stop))
        for role, start, stop in bounds
    )
    return [part for part in parts if part.span[0] < part.span[1]]


def turn(parts: Sequence[SpokenPart], number: int) -> list[SpokenPart]:
    """Return the parts of one turn: its question, and everything up to the next question.

    Args:
        parts: the parts of the conversation.
        number: the number of the question, counted from 1.

    Raises:
        InvalidArgumentError: there is no question with that number.
    """
    questions = [place for place, part in enumerate(parts) if part.role == "user"]
    if not 1 <= number <= len(questions):
        raise wrong(
            "drop",
            f"expected the number of one of the {len(questions)} turns of the conversation, but "
            f"got {number}",
            "The first turn has the number 1",
        )
    begin, stop = questions[number - 1], [*questions, len(parts)][number]
    return list(parts[begin:stop])


def thinking(tokenizer: Any, ids: Sequence[int], start: int) -> list[Span]:
    """Find the tokens of an answer in which the model thinks, and the marks around them.

    `MARKS` lists the known marks. Thinking without a final mark extends to the end of the answer.

    Args:
        tokenizer: the tokenizer of the model.
        ids: the tokens of the answer.
        start: the position of the first of them in the conversation.

    Returns:
        The spans in positions of the conversation; empty if there is no thinking.
    """
    text, offsets = _decoded(tokenizer, ids)
    return [
        (start + begin, start + end)
        for match in _THOUGHT.finditer(text)
        for begin, end in tokens_of(offsets, *match.span())
    ]


def _decoded(tokenizer: Any, ids: Sequence[int]) -> tuple[str, list[Span]]:
    """Decode tokens one by one.

    Returns:
        The text, and the offsets of every token in it. Tokens that only together make a character
        all have the offsets of that character. If the last tokens make no complete character, they
        are at the end of the text and empty.
    """
    text, offsets, together = "", list[Span](), list[int]()
    for token in ids:
        together.append(token)
        piece = tokenizer.decode(together)
        if not piece.endswith("\ufffd") or len(together) == _MOST_BYTES:
            offsets += [(len(text), len(text) + len(piece))] * len(together)
            text += piece
            together = []
    return text, offsets + [(len(text), len(text))] * len(together)
