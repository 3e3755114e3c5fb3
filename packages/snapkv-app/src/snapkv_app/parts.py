"""Parts of a conversation, and which of its tokens are whose."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from snapkv.errors import InvalidArgumentError
from snapkv.policies.spans import Span
from snapkv_app.prompts import Prompt

ROLES = ("system", "user", "assistant", "tool", "document")
"""What a part of a conversation is, as saved ones number them; none has a tool's results now."""


@dataclass(frozen=True, kw_only=True)
class SpokenPart:
    """Something that was said, and its tokens, what the template writes around it included."""

    role: str
    span: Span


def tokens_between(offsets: Sequence[Span], start: int, stop: int) -> Span:
    """The tokens that end between two characters."""
    within = [place for place, (_, end) in enumerate(offsets) if start < end <= stop]
    return (within[0], within[-1] + 1) if within else (0, 0)


def generation_tokens(tokenizer: Any) -> int:
    """How many tokens a chat template writes before an answer."""
    if not tokenizer.chat_template:
        return 0
    turns = [{"role": "user", "content": "What?"}]
    plain = tokenizer.apply_chat_template(turns, tokenize=False)
    begun = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return len(tokenizer(begun.removeprefix(plain), add_special_tokens=False)["input_ids"])


def question_parts(tokenizer: Any, prompt: Prompt, document: str) -> list[SpokenPart]:
    """The parts of a prompt with one question about a document, where the tokenizer tells."""
    if not getattr(tokenizer, "is_fast", False):
        return []
    offsets, own = prompt.offsets(tokenizer, "document", ""), prompt.system_characters
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
    """The question of that number, counted from one, and what stands before the next one."""
    asked = [place for place, part in enumerate(parts) if part.role == "user"]
    if not 1 <= number <= len(asked):
        raise InvalidArgumentError(
            f"drop: expected the number of one of the {len(asked)} turns so far, got {number}; "
            "the first one is 1"
        )
    begin, stop = asked[number - 1], [*asked, len(parts)][number]
    return list(parts[begin:stop])
